"""The `endpoint` benchmark against a scripted server, and against a real mlx_lm.server."""

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tiny
from mlx_dflash.benchmarks import endpoint, schema
from mlx_dflash.benchmarks.endpoint_client import Client, Events, server_at
from mlx_dflash.benchmarks.endpoint_metrics import kind_by, overlap, parse, reading, turning_points
from mlx_dflash.benchmarks.metrics import burst_gaps, decode_seconds, decode_tps
from mlx_dflash.benchmarks.prompts import Prompt

from mlx_dflash.errors import RequestError

LATE = 0.5  # seconds that a busy machine may add to a scripted wait
DROP, SILENCE = "drop", "silence"
KEY = "a-secret-key"


def chunk(text=None, reason=None, **more):
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}


def answer(*texts, first=0.0, gap=0.0, usage=True):
    """Steps of a whole answer: seconds to wait, objects to send as events."""
    steps = [first, chunk(""), chunk(texts[0])]
    for text in texts[1:]:
        steps += [gap, chunk(text)]
    steps.append(chunk(reason="stop"))
    if usage:
        steps.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(texts)}})
    return [*steps, b"data: [DONE]\n\n"]


class Stub:
    """A server that answers by script.

    script(body) gives steps: a number waits, an object is sent as an event, bytes as they are, DROP cuts the
    connection, SILENCE says nothing more; an int first is a status whose answer is the next object. bodies: what was
    asked; most: how many were served at once; headers: of the last request.
    """

    def __init__(self, script):
        self.script, self.bodies, self.headers = script, [], {}
        self.models, self.metrics = [{"id": "tiny"}], lambda: None
        self.running = self.most = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"stub": self}))
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def asked(self):
        """The texts of the prompts, in order."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    stub: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        found = {"/v1/models": json.dumps({"data": self.stub.models}), "/metrics": self.stub.metrics()}.get(self.path)
        self.whole(404 if found is None else 200, found or "nothing here")

    def whole(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.close_connection = True
        with self.stub.lock:
            self.stub.bodies.append(body)
            self.stub.headers = dict(self.headers)
            self.stub.running += 1
            self.stub.most = max(self.stub.most, self.stub.running)
        try:
            self.play(self.stub.script(body))
        except OSError:  # the client has gone
            pass
        finally:
            with self.stub.lock:
                self.stub.running -= 1

    def play(self, steps):
        if type(steps[0]) is int:
            return self.whole(steps[0], json.dumps(steps[1]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for step in steps:
            if step == DROP:
                return self.connection.shutdown(socket.SHUT_RDWR)
            if step == SILENCE:
                return self.stub.over.wait(30)
            if isinstance(step, float):
                time.sleep(step)
                continue
            data = step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def serve():
    """Start a scripted server."""
    stubs = []

    def start(script):
        stubs.append(Stub(script))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.close()


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Run the command on prompts with these texts; returns its code and its result."""

    def run(url, texts, *argv, output=None):
        prompts = [Prompt(id=f"p{i}", task="chat", messages=[{"role": "user", "content": t}])
                   for i, t in enumerate(texts)]  # fmt: skip
        monkeypatch.setattr(endpoint, "chosen", lambda args: (prompts, "of the test"))
        parser = argparse.ArgumentParser()
        endpoint.add_arguments(parser)
        path = output or tmp_path / f"{time.monotonic_ns()}.json"
        code = endpoint.run(parser.parse_args(["--url", url, "--output", str(path), *argv]))
        run.printed = capsys.readouterr()
        return code, schema.read(path)

    return run


def warm(result, users=None):
    return [r for r in result["requests"] if not r["cold"] and users in (None, r["concurrency"])]


def by_id(result, users):
    return {r["id"]: r for r in warm(result, users)}


# Figures


def test_figures_follow_the_script(serve, bench):
    stub = serve(lambda body: answer(*"abcde", first=0.1, gap=0.05))
    code, result = bench(stub.url, ["one", "two", "three", "four"], "--concurrency", "1", "2")
    assert (code, result["finished"], result["mode"]) == (0, True, "greedy")
    assert len(result["requests"]) == 9 and [r["cold"] for r in result["requests"]].count(True) == 1
    for record in result["requests"]:
        assert (record["tokens"], record["tokens_from"], record["prompt_tokens"]) == (5, "usage", 7)
        assert (record["finish_reason"], record["error"], record["loop"]) == ("stop", None, False)
        assert 0.1 <= record["ttft"] <= 0.1 + LATE
        gaps = burst_gaps(record["arrivals"])
        assert len(gaps) == 4 and 0.1 <= sum(gaps) <= 0.2 + LATE  # the first chunk may be read late
        assert record["arrivals"][-1][0] >= 0.3 and sorted(gaps)[1] > 0.02
        assert 0.3 <= record["seconds"] <= 0.3 + 2 * LATE
    one, two = (result["summary"]["arms"][f"{n} at once"] for n in (1, 2))
    for level in (one, two):
        assert level["finish_reasons"] == {"stop": 4} and level["errors"] == {} and level["failed"] == 0
        assert 0.1 <= level["ttft"]["p50"] <= 0.1 + LATE and level["user_tps"]["p90"] <= level["user_tps"]["p50"]
        assert 5 / (0.3 + LATE) <= level["user_tps"]["p50"] <= 5 / 0.3
        assert 0.05 <= level["itl_burst"]["p50"] + 0.01 <= 0.06 + LATE
        assert 4 / (0.2 + LATE) <= level["raw_tps"] <= 4 / 0.1
    assert 20 / (1.2 + 4 * LATE) <= one["aggregate_tps"] <= 20 / 1.2
    assert one["aggregate_tps"] * 1.1 < two["aggregate_tps"] <= 20 / 0.6
    assert (one["in_flight"]["most"], two["in_flight"]["most"], stub.most) == (1, 2, 2)
    assert result["summary"]["more_users"]["little_growth"] is None
    out, err = bench.printed
    assert out.startswith("greedy, tiny at ") and "1 at once" in out and "acceptance unknown" in out
    assert err.startswith("greedy | tiny at ") and err.count("tokens/s in all") == 2 and "\x1b" not in err


def test_as_many_requests_run_at_once_as_the_level_says(serve, bench):
    together = threading.Barrier(4)

    def script(body):
        if len(stub.bodies) > 1:  # the cold one comes alone
            together.wait(20)
        return answer("a")

    stub = serve(script)
    code, result = bench(stub.url, list("abcdefgh"), "--concurrency", "4")
    assert (code, stub.most, result["summary"]["arms"]["4 at once"]["in_flight"]["most"]) == (0, 4, 4)
    assert not any("ran at once" in mark for mark in result["marks"])
    _, result = bench(serve(lambda body: answer("a", first=0.05)).url, ["a", "b"], "--concurrency", "8")
    assert any("8 at once: no more than 2 of its 2 requests ran at once" in mark for mark in result["marks"])


def test_requests_go_round_the_prompts(serve, bench):
    stub = serve(lambda body: answer("a"))
    _, result = bench(stub.url, ["one", "two"], "--concurrency", "1", "--requests", "3")
    assert stub.asked() == ["one", "one", "two", "one"]  # the first is the cold one
    assert [(r["id"], r["repeat"]) for r in warm(result)] == [("p0", 0), ("p1", 0), ("p0", 1)]
    _, result = bench(stub.url, ["one", "two"], "--concurrency", "1", "--requests", "1")
    assert result["setup"]["prompts"]["count"] == 1 and len(warm(result)) == 1


def test_where_more_users_stop_paying():
    def level(aggregate, user):
        return {"aggregate_tps": aggregate, "user_tps": {"p50": user}}

    found = turning_points({1: level(100, 100), 2: level(180, 90), 4: level(190, 48), 8: level(380, 47)})
    assert (found["little_growth"], found["half_speed"]) == (4, 4)
    found = turning_points({2: level(100, 50), 4: level(150, 40), 8: level(None, None)})
    assert (found["little_growth"], found["half_speed"]) == (None, None)
    assert turning_points({1: level(None, None)})["half_speed"] is None


def test_time_is_counted_once_where_requests_overlap():
    assert overlap([(0, 2), (1, 3), (5, 6), (6, 7)]) == (5, 2)
    assert overlap([]) == (0, 0)


# What is sent


def test_every_sampler_field_is_sent_and_recorded_with_its_origin(serve, bench, monkeypatch):
    stub = serve(lambda body: answer("a"))
    monkeypatch.setenv("MY_KEY", KEY)
    argv = ["--concurrency", "1", "--temp", "0.7", "--top-k", "20", "--api-key-env", "MY_KEY", "--max-tokens", "9"]
    _, result = bench(stub.url, ["one"], *argv)
    sent = {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0,
            "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0}  # fmt: skip
    rest = {"model": "tiny", "messages": [{"role": "user", "content": "one"}], "max_tokens": 9, "stream": True}
    for body in stub.bodies:
        assert body == {**rest, **sent, "stream_options": {"include_usage": True}}
    assert stub.headers["Authorization"] == f"Bearer {KEY}"
    setup = result["setup"]
    assert (result["mode"], setup["sent"], setup["sampling"]["temp"]) == ("sampled", sent, 0.7)
    assert {k for k, v in setup["sampling_from"].items() if v == "given"} == {"temp", "top_k"}
    assert KEY not in json.dumps(result) + "".join(bench.printed)


def test_fields_beyond_openai_and_the_seed_can_be_left_out(serve, bench):
    stub = serve(lambda body: answer("a"))
    _, result = bench(stub.url, ["one"], "--concurrency", "1", "--send-only-openai", "--seed", "none")
    names = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
    assert set(stub.bodies[-1]) == {"model", "messages", "max_tokens", "stream", "stream_options"} | names
    assert result["setup"]["send_only_openai"] is True
    assert (result["setup"]["sampling"]["seed"], result["setup"]["sampling_from"]["seed"]) == (None, "given")


def test_tools_of_a_prompt_are_sent_and_calls_and_reasoning_count_as_text(serve):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]}
    thought = {"choices": [{"delta": {"role": "assistant", "reasoning_content": "hm", "content": None}}]}
    end = b"data: [DONE]\n\n"
    stub = serve(lambda body: [thought, call, chunk(reason="tool_calls"), end])
    prompt = Prompt(id="p", task="tools", messages=[{"role": "user", "content": "x"}], tools=[tool])
    body = endpoint.body_of({"model": "m", "max_tokens": 3, "sent": {}}, prompt)
    reply = Client(server_at(stub.url)).ask(body)
    assert stub.bodies[0]["tools"] == [tool]
    assert (len(reply.arrivals), reply.texts[0], reply.finish_reason, reply.error) == (2, "hm", "tool_calls", None)


@pytest.mark.parametrize(
    ("url", "argv", "said"),
    [
        ("ftp://host/v1", [], "--url must be like"),
        ("http://user:word@host/v1", [], "must hold no user"),
        ("http://host:port/v1", [], "is no address"),
        ("http://127.0.0.1:9/v1", [], "nothing answers at http://127.0.0.1:9/v1"),
        (None, ["--api-key-env", "NO_SUCH_KEY"], "the environment has no NO_SUCH_KEY"),
        (None, ["--concurrency", "0"], "--concurrency must be 1 or more"),
        (None, ["--requests", "0"], "--requests must be 1 or more"),
        (None, [], "names no model"),
    ],
)
def test_what_a_user_can_mend_is_said_before_anything_is_sent(serve, bench, url, argv, said):
    stub = serve(lambda body: answer("a"))
    stub.models = []
    with pytest.raises(RequestError, match=said):
        bench(url or stub.url, ["one"], *argv)
    assert stub.bodies == []


# What fails


def test_each_failure_is_recorded_with_what_came_before_and_the_rest_goes_on(serve, bench):
    begun = [chunk("a"), 0.02, chunk("b")]
    scripts = {
        "drop": [*begun, DROP],
        "stall": [*begun, SILENCE],
        "malformed": [*begun, b"data: {not json\n\n"],
        "odd": [*begun, {"choices": [7]}],
        "error": [*begun, {"error": {"message": "out of memory"}}],
        "old error": [*begun, b'error: {"message": "slot"}\n\n'],
        "short": begun,
        "whole": [b'{"choices": [{"message": {"content": "all at once"}}]}'],
        "500": [500, {"error": {"message": "no room"}}],
        "429": [429, {"detail": "slow down"}],
    }
    stub = serve(lambda body: scripts.get(body["messages"][0]["content"]) or answer("a", "b", gap=0.02))
    texts = ["good", *scripts, "good too"]
    code, result = bench(stub.url, texts, "--concurrency", "2", "4", "--timeout", "0.6")
    assert (code, result["finished"]) == (0, True)
    kinds = {
        "drop": "dropped: ",
        "stall": "stalled: no byte for 0.6 s",
        "malformed": "malformed: {not json",
        "odd": "malformed: ",
        "error": "error in the stream: out of memory",
        "old error": "error in the stream: slot",
        "short": "dropped: ",
        "whole": "not a stream: ",
        "500": "HTTP 500: no room",
        "429": "HTTP 429: slow down",
    }
    for users in (2, 4):
        records = by_id(result, users)
        assert len(records) == len(texts)
        for i, text in enumerate(texts):
            record = records[f"p{i}"]
            if text in kinds:
                assert record["error"].startswith(kinds[text]), text
                came = 0 if text in ("whole", "500", "429") else 2
                assert (len(record["arrivals"]), record["tokens"], record["finish_reason"]) == (came, came, None)
                assert (record["ttft"] is None) == (came == 0)
            else:
                assert (record["error"], record["tokens"], record["finish_reason"]) == (None, 2, "stop")
        assert 0.6 <= records["p2"]["seconds"] <= 0.6 + 2 * LATE
        level = result["summary"]["arms"][f"{users} at once"]
        assert level["errors"] == {"dropped": 2, "stalled": 1, "malformed": 2, "error in the stream": 2,
                                   "not a stream": 1, "HTTP 500": 1, "HTTP 429": 1}  # fmt: skip
        assert (level["requests"], level["failed"], level["finish_reasons"]) == (12, 10, {"stop": 2})
        assert any(mark.startswith(f"{users} at once: 10 of 12 requests failed (") for mark in result["marks"])
    assert "HTTP 429 1" in bench.printed.out


def test_a_server_that_goes_away_is_recorded(serve, bench):
    stub = serve(lambda body: answer("a"))

    def script(body):
        if len(stub.bodies) == 3:
            stub.server.shutdown()
            stub.server.server_close()
        return answer("a")

    stub.script = script
    code, result = bench(stub.url, list("abcd"), "--concurrency", "1")
    kinds = [(r["error"] or "none").split(":")[0] for r in warm(result)]
    assert (code, kinds) == (0, ["none", "none", "unreachable", "unreachable"])


def test_a_refusal_of_fields_names_the_way_out_and_the_key_stays_out(serve, bench, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    stub = serve(lambda body: [400, {"error": {"message": f"unknown field top_k, key {KEY}"}}])
    code, result = bench(stub.url, ["one"], "--concurrency", "1", "--api-key-env", "MY_KEY")
    assert code == 0 and warm(result)[0]["error"] == "HTTP 400: unknown field top_k, key [key]"
    assert any("try --send-only-openai" in mark for mark in result["marks"])
    assert any("the first request, cold, failed" in mark for mark in result["marks"])


def test_events_are_found_however_their_bytes_come():
    stream = b': keepalive 1/2\n\ndata: {"a":1}\r\n\r\nevent: x\ndata:b\ndata: c\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        events = Events()
        found = [e for i in range(0, len(stream), size) for e in events.feed(stream[i : i + size])]
        assert found == [b'{"a":1}', b"b\nc", b"[DONE]"]


# How tokens are counted


def test_without_usage_chunks_are_counted_and_the_run_says_so(serve, bench):
    _, result = bench(serve(lambda body: answer(*"abc", usage=False)).url, ["one"], "--concurrency", "1")
    record = warm(result)[0]
    assert (record["tokens"], record["tokens_from"], record["prompt_tokens"]) == (3, "chunks", 0)
    assert any("tokens counted by chunks in 1 of 1 requests" in mark for mark in result["marks"])


def test_chunks_of_several_tokens_are_one_arrival_each_and_the_run_says_so(serve, bench):
    def script(body):
        told = {"prompt_tokens": 7, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 5}}
        return [*answer(*"abc", gap=0.1, usage=False)[:-1], {"choices": [], "usage": told}, b"data: [DONE]\n\n"]

    _, result = bench(serve(script).url, ["one"], "--concurrency", "1")
    record, level = warm(result)[0], result["summary"]["arms"]["1 at once"]
    assert (record["tokens"], record["chunks"], record["cached_tokens"]) == (12, 3, 5)
    assert [n for _, n in record["arrivals"]] == [1, 1, 1]
    assert level["raw_tps"] == pytest.approx(decode_tps(record)) == pytest.approx(8 / decode_seconds(record))
    assert level["raw_tps"] <= 8 / 0.1
    assert any("chunks hold several tokens" in mark and "by chunk" in mark for mark in result["marks"])
    assert any("71% of the prompts' tokens in its cache" in mark for mark in result["marks"])


def test_an_answer_without_text_arrives_with_its_end(serve, bench):
    end = [0.05, chunk(reason="stop"), {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}]
    _, result = bench(serve(lambda body: end).url, ["one"], "--concurrency", "1")
    record = warm(result)[0]
    assert (record["error"], record["tokens"]) == (None, 1) and 0.05 <= record["ttft"] <= 0.05 + LATE


# What the server says of its drafts

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} %d.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} %d.0
"""


def test_vllm_counters_are_differenced_over_each_level(serve, bench):
    stub = serve(lambda body: answer("a"))
    each = (10, 20, 11, 8, 3)
    stub.metrics = lambda: VLLM % tuple(1000 + n * len(stub.bodies) for n in each)
    _, result = bench(stub.url, ["one", "two", "three"], "--concurrency", "1", "2")
    assert result["setup"]["server"] == "vLLM" and stub.bodies[0]["top_k"] == -1
    for arm, level in result["summary"]["arms"].items():
        assert level["acceptance"] == pytest.approx(11 / 20)
        assert level["mean_accepted_length"] == pytest.approx(1 + 11 / 10)
        assert level["acceptance_by_position"] == pytest.approx([0.8, 0.3])
        drafting = result["summary"]["server"]["levels"][arm]
        assert (drafting["counts"]["drafts"], drafting["counts"]["accepted_by_position"]) == (30, [24, 9])
        assert "vllm:spec_decode_num_accepted_tokens / vllm:spec_decode_num_draft_tokens" in drafting["definition"]
        assert drafting["words"] == {"vllm:spec_decode_num_drafts_total": "Number of spec decoding drafts."}
    assert "acceptance by the server: 1 at once 55.0%, 2 at once 55.0%" in bench.printed.out


def test_counters_without_suffix_of_several_engines_add_up():
    before, after = (parse("\n".join(f'vllm:spec_decode_num_{name}{{engine="{e}"}} {n * t}'
                                     for name, n in (("drafts", 2), ("draft_tokens", 8), ("accepted_tokens", 3))
                                     for e in "01")) for t in (1, 3))  # fmt: skip
    found = reading("vLLM", before, after, [])
    assert (found["acceptance"], found["mean_accepted_length"]) == (3 / 8, 1 + 3 / 2)
    assert reading("vLLM", before, before, [])["reason"] == "no token was drafted"
    assert "started anew" in reading("vLLM", after, before, [])["reason"]
    assert "without speculative decoding" in reading("vLLM", parse("vllm:x 1"), parse("vllm:x 1"), [])["reason"]
    assert "did not answer" in reading("vLLM", None, after, [])["reason"]


def test_sglang_gauges_hold_their_last_value():
    page = parse('sglang:spec_accept_length{tp_rank="0"} 2.75\nsglang:spec_accept_rate{tp_rank="0"} 0.5\n')
    found = reading("SGLang", None, page, [])
    assert (found["mean_accepted_length"], found["acceptance"]) == (2.75, 0.5)
    assert "gauges" in found["definition"]
    assert "without speculative decoding" in reading("SGLang", None, parse("sglang:spec_accept_length 0"), [])["reason"]
    assert "--enable-metrics" in reading("SGLang", None, None, [])["reason"]


def test_llama_cpp_tells_drafts_with_each_answer(serve, bench):
    timings = {"draft_n": 8, "draft_n_accepted": 6, "cache_n": 3}
    stub = serve(lambda body: [chunk("a"), chunk(reason="stop", timings=timings), b"data: [DONE]\n\n"])
    stub.models = [{"id": "tiny", "owned_by": "llamacpp"}, {"id": "other"}]
    _, result = bench(stub.url, ["one", "two"], "--concurrency", "1")
    level = result["summary"]["arms"]["1 at once"]
    assert (level["acceptance"], level["mean_accepted_length"]) == (0.75, None)
    assert result["summary"]["server"]["levels"]["1 at once"]["counts"] == {"drafted": 16, "accepted": 12}
    assert (warm(result)[0]["drafted"], warm(result)[0]["cached_tokens"]) == (8, 3)
    assert any("lists 2 models" in mark for mark in result["marks"])


def test_other_servers_have_a_reason_and_no_acceptance(serve, bench):
    _, result = bench(serve(lambda body: answer("a")).url, ["one"], "--concurrency", "1")
    level = result["summary"]["arms"]["1 at once"]
    assert level["acceptance"] is None
    assert result["summary"]["server"]["levels"]["1 at once"]["reason"].startswith("unknown server")
    assert "draft_n" in reading("llama.cpp", None, None, [])["reason"]
    assert kind_by("0.32.2-0.32.0-macOS-15.1-arm64-arm-64bit-applegpu_g16s") == "mlx_lm.server"
    assert kind_by("b1234-abcdef") is kind_by("fp_44709d6fcb") is kind_by(None) is None


# Going on


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(serve, bench, monkeypatch, tmp_path):
    stub = serve(lambda body: answer("a", "b"))
    each = (10, 20, 11, 8, 3)
    stub.metrics = lambda: VLLM % tuple(n * len(stub.bodies) for n in each)
    texts, output = list("abcdef"), tmp_path / "result.json"

    def pressed(arm, finished, total):
        if arm == "2 at once" and len(finished) == 3:
            raise KeyboardInterrupt

    argv = ["--concurrency", "1", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "progress", pressed)
        code, result = bench(stub.url, texts, *argv, output=output)
    assert (code, result["finished"], len(warm(result, 1))) == (130, False, 6)
    kept = warm(result, 2)
    assert 3 <= len(kept) <= 5 and all(r["error"] is None for r in kept)
    assert any("run it again to go on" in mark for mark in result["marks"])
    time.sleep(0.1)  # what was under way has come to the stub
    sent = len(stub.bodies)
    code, result = bench(stub.url, texts, *argv, output=output)
    assert (code, result["finished"], len(warm(result, 1)), len(warm(result, 2))) == (0, True, 6, 6)
    assert len(stub.bodies) - sent == 6 - len(kept)
    assert result["summary"]["arms"]["2 at once"]["acceptance"] == pytest.approx(0.55)
    assert not any("go on" in mark for mark in result["marks"])

    sent, before = len(stub.bodies), output.read_text()
    code, result = bench(stub.url, texts, *argv, output=output)
    assert (code, len(stub.bodies), output.read_text()) == (0, sent, before)
    assert "finished; remove it to measure again" in bench.printed.err
    with pytest.raises(RequestError, match="holds another run"):
        bench(stub.url, texts, *argv, "--temp", "1", output=output)


def test_what_failed_is_sent_again_by_a_run_that_goes_on(serve, bench, monkeypatch, tmp_path):
    stub, output = serve(lambda body: [500, {}]), tmp_path / "result.json"

    def pressed(arm, finished, total):
        if arm != "cold" and len(finished) == total:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "progress", pressed)
        code, result = bench(stub.url, ["one", "two"], "--concurrency", "1", output=output)
    assert code == 130 and all(r["error"] for r in result["requests"])
    stub.script = lambda body: answer("a")
    code, result = bench(stub.url, ["one", "two"], "--concurrency", "1", output=output)
    assert code == 0 and len(result["requests"]) == 3 and not any(r["error"] for r in result["requests"])
    assert any("3 requests that failed before were sent again" in mark for mark in result["marks"])


def test_ctrl_c_in_a_terminal_ends_the_command_with_130(serve, tmp_path):
    busy = threading.Event()

    def script(body):
        if len(stub.bodies) > 3:  # one cold and two that end
            busy.set()
            return [chunk("a"), SILENCE]
        return answer("a")

    stub, output = serve(script), tmp_path / "result.json"
    command = [sys.executable, "-m", "mlx_dflash.benchmarks", "endpoint", "--url", stub.url, "--concurrency", "1",
               "--output", str(output)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert busy.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    assert len(warm(schema.read(output))) == 2 and "run it again to go on" in out


def test_a_terminal_gets_one_line_that_is_written_over(serve, bench, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    bench(serve(lambda body: answer("a")).url, ["one", "two"], "--concurrency", "1")
    first, cold, level, rest = seen.getvalue().split("\n")
    assert first.startswith("greedy | ") and cold.endswith("cold: 1 of 1 requests") and rest == ""
    assert level.count("\r\x1b[K[") >= 2 and level.endswith("1 at once: 2 of 2 requests")


# A real server

TEMPLATE = "{% for m in messages %}{{ 'w6 ' }}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w8 {% endif %}"


@pytest.fixture
def real_server(tmp_path):
    """An mlx_lm.server with a tiny model on a free port."""
    changed = {"chat_template": TEMPLATE, "eos_token": tiny.REMOVE}
    folder = tiny.copy_folder(tiny.target_folder("llama"), tmp_path / "target", tokenizer_config=changed)
    (tmp_path / "hub").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-2000:]
            try:
                connection = HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", folder
    finally:
        process.terminate()
        process.wait(20)


def test_a_real_mlx_lm_server(real_server, bench):
    url, folder = real_server
    code, result = bench(url, ["w30 w31 w32", "w40 w41"], "--concurrency", "1", "2", "--max-tokens", "12")
    assert (code, result["finished"], result["setup"]["model"]) == (0, True, str(folder.resolve()))
    assert len(warm(result)) == 4
    for record in result["requests"]:
        assert (record["error"], record["tokens_from"]) == (None, "usage")
        assert 1 <= record["tokens"] <= 12 and record["prompt_tokens"] in (4, 5) and record["ttft"] > 0
        assert record["finish_reason"] in ("length", "stop")
    for users in (1, 2):
        level = result["summary"]["arms"][f"{users} at once"]
        assert level["aggregate_tps"] > 0 and level["user_tps"]["p50"] > 0
        reason = result["summary"]["server"]["levels"][f"{users} at once"]["reason"]
        assert reason == "mlx_lm.server publishes nothing about its drafts"
    first, again = by_id(result, 1), by_id(result, 2)
    assert all(first[name]["tokens_hash"] == again[name]["tokens_hash"] for name in first)  # greedy
    assert any("--seed none" in mark for mark in result["marks"])
