"""Built-in prompts for training and validating a drafter: six task classes, no network.

Training prompts are every template of a class filled with every subject of it. Held-out prompts are whole sentences of
their own, written apart; `tests/test_training.py` checks that none of them is a training prompt.
"""

import random
from itertools import product

# class -> groups of (templates with one {}, subjects between bars)
TRAINING: dict[str, list[tuple[list[str], str]]] = {
    "code": [
        (
            [
                "Write a Python function that {}.",
                "Write a short Python program that {} and explain it.",
                "Show me how to write JavaScript code that {}.",
                "How would I write a C function that {}?",
                "Write a unit test for a Python function that {}.",
                "Give me a Python class with a method that {}.",
            ],
            """reverses a string|checks whether a number is prime|sorts a list of integers|counts the words in a text
            computes the factorial of n|finds the largest element of a list|removes duplicates from a list
            reads a CSV file and sums a column|merges two sorted lists|checks whether a word is a palindrome
            converts Celsius to Fahrenheit|computes the n-th Fibonacci number|counts the vowels in a string
            finds the greatest common divisor of two numbers|flattens a nested list|implements a stack
            implements a queue|searches a sorted list by bisection|validates an email address
            computes the average of a list|parses a JSON string|downloads a web page|draws a triangle of stars
            counts how often each letter occurs|transposes a matrix|rotates a list by k places
            finds two numbers with a given sum|capitalises every word|generates a random password
            computes the area of a circle|splits a list into chunks|checks whether two strings are anagrams
            converts a number to binary|prints a multiplication table""",
        ),
        (
            ["{}", "{} Add comments.", "{} Give a short example."],
            """Write a Python script that lists all files in a folder.
            Write a Python function that merges two dictionaries.|How do I read user input in Python?
            Write a Java class for a bank account.|Write a SQL query that counts the orders of each customer.
            Write a SQL query that finds the three most expensive products.|Write a CSS rule that centres a box.
            Write HTML for a page with a heading and a list of links.
            Write a bash script that counts the lines of all Python files.|Explain what a for loop does in Python.
            What is a dictionary in Python?|How do I handle exceptions in Python?
            Write a Python function that finds the longest word in a sentence.
            Write a JavaScript function that adds all numbers in an array.
            Write a recursive function for the sum of digits.|What is the difference between a list and a tuple?
            Write a Python class for a rectangle with area and perimeter.
            Write a regular expression that matches a phone number.|How do I sort a list of dictionaries by a key?
            Write a simple calculator in Python.|Write a program that guesses a number.
            Write a C program that prints the first ten squares.|How do I make an HTTP request in JavaScript?
            Write a linked list with an append method in Python.
            Write a Python function that computes the dot product of two vectors.
            Explain recursion with an example.|Write a function that checks whether brackets are balanced.
            How do I write to a file in Python?|Write a Python generator for even numbers.
            Write a Git command list for a beginner.""",
        ),
    ],
    "maths": [
        (
            [
                "{} Show your steps.",
                "{}",
                "Solve this problem step by step: {}",
                "{} Explain how you got the answer.",
                "Here is a homework question. {}",
            ],
            """What is 15% of 240?|A train travels 120 km in 1.5 hours. What is its speed?|What is 12 times 17?
            If 3 apples cost 2 dollars, how much do 12 apples cost?
            What is the area of a rectangle with sides 7 and 9?|Solve 2x + 6 = 18.
            What is the sum of the first 20 positive integers?|Simplify 18/24.
            A shirt costs 40 dollars and is reduced by 25%. What is the new price?|What is the square root of 144?
            Tom has 5 boxes with 8 pencils each and gives away 11 pencils. How many are left?
            What is 7 to the power of 3?|What is the perimeter of a square with side 11?|Solve x^2 - 5x + 6 = 0.
            How many minutes are in 3.5 hours?
            A recipe for 4 people needs 300 g of flour. How much is needed for 10 people?|What is 1/3 + 1/4?
            What is the probability of rolling an even number with a fair die?|Convert 0.375 to a fraction.
            Anna is twice as old as Ben, and together they are 36. How old is Ben?
            What is the volume of a cube with side 5?
            A car uses 6 litres per 100 km. How much does it use for 250 km?|What is the derivative of x^3?
            What is the mean of 4, 8, 15, 16, 23 and 42?|What is the next number in 2, 4, 8, 16?
            How many prime numbers are below 30?
            A bank pays 5% interest a year on 1000 dollars. How much is it after 2 years?|What is 1000 minus 387?""",
        ),
        (
            ["{}", "Please solve: {}", "{} Think step by step."],
            """A box holds 24 bottles. How many bottles are in 7 boxes?
            Lisa saves 15 dollars a week. How much does she have after 8 weeks?
            A rope of 36 m is cut into pieces of 4 m. How many pieces are there?|What is 25% of 360?
            A tank holds 500 litres and loses 20 litres an hour. When is it empty?|Solve 5x - 7 = 23.
            What is 2/3 of 90?|A bus has 48 seats and is three quarters full. How many seats are free?
            The sides of a triangle are 3, 4 and 5. What is its area?|What is 0.2 times 0.3?
            How many hours are in a week?|A pack of 6 eggs costs 3 dollars. What does one egg cost?
            What is the sum of the angles in a triangle?|If today is Wednesday, what day is it in 10 days?
            A class has 12 girls and 18 boys. What is the ratio?|What is the greatest common divisor of 36 and 48?
            What is 13 squared?|A film starts at 19:40 and lasts 125 minutes. When does it end?
            Solve 3(x + 2) = 21.|A phone costs 600 dollars plus 19% tax. What is the total?
            How many faces does a cube have?|What is the average of 10, 20 and 60?
            Paul runs 3 km a day. How far does he run in June?|What is 1000 divided by 8?
            A circle has radius 7. What is its circumference?|Write 45 as a product of primes.""",
        ),
    ],
    "chat": [
        (
            ["{}", "Hi! {}", "I have a question. {}", "{} Please keep it short.", "Can you help me? {}"],
            """What are good ways to fall asleep faster?|How do I cook rice?
            What should I pack for a week at the sea?|How can I learn to play the guitar?
            What is a good breakfast?|How do I remove a coffee stain?|I feel nervous about a job interview.
            How can I save money every month?|What can I do with my children on a rainy day?
            How do I start running?|What is a good present for my mother?|How do I make new friends in a new city?
            How do I write a polite email to my boss?|What are some tips for learning a language?
            How do I take care of a cactus?|What should I visit in Rome?|How can I drink more water?
            How do I train a puppy?|What are healthy snacks?|How do I prepare for an exam?
            Which hobbies are good for introverts?|How do I clean a keyboard?|How can I stop procrastinating?
            What is a simple pasta recipe?|How do I say no to a friend?|How do I plan a birthday party?
            What can I cook with eggs and potatoes?|How can I be more productive at work?
            How do I fix a flat bicycle tyre?""",
        ),
        (
            ["{}", "Hello! {}", "{} What do you think?"],
            """How do I make a good cup of coffee?|What can I do against a headache?
            My dog is afraid of thunder. How can I help it?|How do I ask for a raise?
            What is a good first instrument for a child?|How can I make my flat feel cosier?
            I can't concentrate at work. What helps?|What should I wear to a wedding?
            How do I get over a cold quickly?|How do I write a thank-you note?
            What are some fun things to do at the weekend?|How do I keep vegetables fresh?
            I want to read more. Any tips?|How do I start a garden?|How can I learn to cook?
            What are good questions for a first date?|How do I pack light?
            How do I deal with a difficult customer?|What is a good way to wake up early?
            How do I teach my son to ride a bicycle?|How can I improve my handwriting?
            Is it better to rent or to buy a house?|How do I choose a laptop?|What should I cook for six guests?
            How do I stay calm in an argument?|How do I find a good doctor?|What can I do with old clothes?
            How do I plan a trip to Japan?""",
        ),
    ],
    "creative": [
        (
            [
                "Write a short story about {}.",
                "Write a poem about {}.",
                "Write the opening paragraph of a novel about {}.",
                "Write a funny dialogue about {}.",
                "Describe {} in vivid words.",
                "Invent a fairy tale about {}.",
            ],
            """a lighthouse keeper|a dragon who is afraid of fire|the first snow of winter
            a robot that learns to paint|a lost dog|an old clock|a village by the sea|a girl who can talk to birds
            the last train of the night|a dreaming mountain|a baker and a ghost|two friends on an island
            a forgotten garden|a journey to the moon|a talking cat|a storm at sea|a magic library
            a boy and his kite|autumn leaves|a secret door|a detective who never sleeps|a river|a wise old turtle
            the city at night|a clumsy wizard|a letter from the past|a star that fell to earth
            a circus without animals|a king without a crown""",
        ),
        (
            [
                "Write a short story about {}.",
                "Write a poem about {}.",
                "Write a dialogue between {} and a stranger.",
                "Describe a day in the life of {}.",
            ],
            """a train driver|a lonely robot|an old violin|a fox in the city|a lighthouse in a storm
            a young astronaut|a baker who bakes at night|a family of mice|a forgotten photograph
            a painter without colours|a talking tree|a queen who hates crowns|a boy who collects sounds
            a ghost who is afraid of people|a snow-covered village|two brothers|a taxi driver in Paris
            a wolf and a lamb|a broken robot|a teacher on the last day of school|a pirate who gets seasick
            a shy dragon|an old map|the moon|a nurse at night""",
        ),
    ],
    "essay": [
        (
            [
                "Explain {} in simple terms.",
                "Write a short essay about {}.",
                "What are the main facts about {}?",
                "Why is {} important?",
                "Describe the history of {}.",
                "What are the advantages and disadvantages of {}?",
            ],
            """photosynthesis|the water cycle|renewable energy|the Roman Empire|artificial intelligence|vaccination
            gravity|the printing press|climate change|democracy|the human heart|volcanoes|black holes|the internet
            evolution|electric cars|the French Revolution|recycling|the solar system|nuclear power|coral reefs
            public transport|the immune system|the stock market|the industrial revolution|sleep|bees|remote work
            the Great Wall of China|earthquakes|social media|antibiotics|space travel|forests|the Olympic Games""",
        ),
        (
            ["Explain {}.", "Write a short text about {}.", "What is {} and how does it work?", "Tell me about {}."],
            """how airplanes fly|the moon|solar panels|the digestive system|the Renaissance|blockchain
            the greenhouse effect|DNA|the Second World War|how bread rises|the brain|machine learning|rain
            how a car engine works|the Egyptian pyramids|coffee|wind turbines|the ozone layer|the United Nations
            how soap works|whales|the Silk Road|magnets|the Amazon rainforest|how batteries work|human rights
            inflation in ancient Rome|a healthy diet|the history of the bicycle|how glaciers form|money|deserts
            how vaccines are made|the human skeleton""",
        ),
    ],
    "rewrite": [
        (
            [
                "Rewrite this sentence in a formal style: {}",
                "Correct the grammar of this sentence: {}",
                "Summarise this in one sentence: {}",
                "Turn this into a list of bullet points: {}",
                "Write a title and three keywords for this text: {}",
                "Write a JSON object with the facts of this sentence: {}",
            ],
            """The meeting is moved to Friday because the manager are sick.|We was late since the bus did not came.
            Our new shop sells bread, cakes and coffee and opens at seven.
            I can't come to the party, I got too much work.
            The team finished the project two weeks early and saved 10,000 dollars.
            He don't like neither tea nor coffee.|The museum has 300 paintings, a garden and a small cafe.
            She has went to the market and buyed apples.|Maria is 34, lives in Madrid and works as a nurse.
            The phone has a large screen, a good camera and a weak battery.
            The weather was bad, so we stayed at home and played chess.
            Paul sold 15 bikes in March and 22 in April.
            The hotel was clean, but the breakfast was poor and the staff unfriendly.
            Me and my brother goes fishing on Sundays.
            The library closes at six on weekdays and at two on Saturdays.|Gonna send you the file later, ok?
            Dogs need exercise, good food, water and a vet once a year.
            The flight leaves at 9:40 from gate 12 and lands at noon.
            The book tells of a young doctor who moves to a small village.
            Prices rose by 4% in May and fell by 1% in June.
            The children plays in the garden while they mother cooks.
            Water boils at 100 degrees and freezes at 0 degrees.""",
        ),
        (
            [
                "Rewrite this more clearly: {}",
                "Fix the mistakes: {}",
                "Summarise this text: {}",
                "Make this sentence shorter: {}",
                "List the key points: {}",
                "Turn this into a question: {}",
            ],
            """The shop is closed on Mondays because of the renovation that are going on.
            Our train was delayed for two hours due to a technical problem with the doors.
            She don't know where he have put the keys.
            The company opened three new offices and hired fifty people last year.
            The soup needs carrots, onions, salt and two litres of water.
            In my opinion I think that the plan is maybe not so good.
            The concert was moved from the park to the hall because it rained all day.
            Students must hand in the form, pay the fee and bring two photos.
            The river was high, the bridge was closed and we had to turn back.
            I has been waiting here since two hour.
            The new law reduces taxes for families and raises them for companies.
            The cat, which was black and very old, was sleeping on the warm roof of the car.""",
        ),
    ],
}

HELD_OUT: dict[str, list[str]] = {
    "code": [
        "Write a Python function that returns the second smallest number in a list.",
        "How do I open a file in Python and print each line with its line number?",
        "Write a SQL query that lists all customers who have not placed an order.",
        "Write a JavaScript function that debounces another function.",
        "Implement a binary search tree with insert and lookup in Python.",
        "Write a bash script that renames all .txt files in a folder to .md.",
        "Write a Python decorator that measures how long a function takes.",
        "Explain what this code does: for i in range(10): print(i ** 2)",
        "Write HTML for a simple contact form with name, email and message.",
        "Write a Python generator that yields the digits of a number from right to left.",
    ],
    "maths": [
        "A farmer has 17 sheep and buys 5 more every month. How many sheep does he have after 6 months?",
        "What is the hypotenuse of a right triangle with legs 9 and 12?",
        "If a book has 320 pages and I read 25 pages a day, how many days do I need?",
        "Solve the system x + y = 10 and x - y = 4.",
        "What is 3/5 of 85?",
        "The temperature was -4 degrees and rose by 11 degrees. What is it now?",
        "A pizza is cut into 8 slices. Three people eat 2 slices each. What fraction is left?",
        "How many different ways can 4 people stand in a line?",
        "What is the least common multiple of 6 and 8?",
        "A cyclist rides 45 km at 15 km/h and then 20 km at 10 km/h. How long does the trip take?",
    ],
    "chat": [
        "My neighbour plays loud music at night. What should I do?",
        "Which films would you recommend for a quiet evening?",
        "How do I keep my houseplants alive while I'm on holiday?",
        "I burnt my soup. Can I save it?",
        "Tell me something interesting about octopuses.",
        "What is the best way to apologise to a colleague?",
        "How can I get rid of ants in my kitchen?",
        "I want to buy a used car. What should I look for?",
        "What do I need for a first camping trip?",
        "How do I choose a good melon at the market?",
    ],
    "creative": [
        "Write a short story about a postman who delivers a letter forty years late.",
        "Write a haiku about a summer evening.",
        "Invent three names for a coffee shop on the moon and say why they fit.",
        "Write a monologue of a snowman in March.",
        "Describe a market in a desert town at dawn.",
        "Write a limerick about a programmer who lost a semicolon.",
        "Write a conversation between the sun and a sunflower.",
        "Tell a bedtime story about a mouse who wanted to see the ocean.",
        "Write the first lines of a crime story set in a chess club.",
        "Write a love letter from a ship to its harbour.",
    ],
    "essay": [
        "Explain how a refrigerator works.",
        "What caused the First World War?",
        "Explain the difference between weather and climate.",
        "How does the human eye see colours?",
        "What is inflation and why does it matter?",
        "Describe the life cycle of a butterfly.",
        "What are the benefits of reading books for children?",
        "Explain how the tides are caused by the moon.",
        "Why did the dinosaurs die out?",
        "Write a short essay on whether cities should ban cars from their centres.",
    ],
    "rewrite": [
        "Make this text friendlier: Your request was rejected. Send the missing documents by Monday.",
        "Correct this sentence: Yesterday I goed to the cinema with my two sister.",
        "Summarise: The council voted to build a new bridge. It will cost 12 million euros and open in three years.",
        "Turn this into a table in Markdown: apples 3 dollars, pears 4 dollars, plums 2 dollars.",
        "Write this as a numbered list: first wash the vegetables, then cut them, then fry them for ten minutes.",
        "Rewrite in the passive voice: The committee chose the winner on Tuesday.",
        "Extract the dates from this text: We met on 3 May 2021, moved in on 1 June 2022 and married on 9 July 2023.",
        "Translate into plain English: The aforementioned party shall henceforth desist from said activities.",
        "Write a subject line for an email that invites colleagues to a lunch on Thursday.",
        "Shorten this sentence: Due to the fact that it was raining very heavily, we made the decision to stay inside.",
    ],
}


# class -> how a user's prompt of that class may begin, between bars; the target goes on from there (`written.py`)
OPENERS: dict[str, str] = {
    "code": """Write a Python function that|Write a Python script that|How do I|Write a SQL query that
        Write a JavaScript function that|Implement a|Write a bash script that|Write a class in Python that
        Explain what this code does:|Write HTML for|Write a function that takes a list and|In Python, how can I""",
    "maths": """A farmer has|If a|Solve the equation|What is the|How many|A train|Sarah has|Calculate the|A shop sells
        What is 3|A rectangle has|Find the|There are|The sum of two numbers is|If I buy""",
    "chat": """My|Which|How do I|I want to|What should I|Tell me something about|How can I|What is the best way to
        Can you recommend|What do I need for|Why do|I need advice about""",
    "creative": """Write a short story about|Write a poem about|Invent|Write a dialogue between|Describe a
        Write a haiku about|Tell a story about|Write a letter from|Write the first lines of a|Write a song about
        Write a monologue of""",
    "essay": """Explain how|What caused|Explain the difference between|How does|Why did|What are the benefits of
        Describe the|Write a short essay on|What is|Why is|How are|Write a paragraph about""",
    "rewrite": """Make this text shorter:|Correct this sentence:|Summarise this text:|Turn this into a list:
        Rewrite this politely:|Translate into plain English:|Write a subject line for an email that
        Rewrite this sentence:|Make this text more formal:|Extract the names from this text:|Fix the grammar:
        Write this as a numbered list:""",
}


def training_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` (class, prompt) pairs, group by group, classes in turn, each once; fewer when the built-ins run out."""
    out: list[tuple[str, str]] = []
    for group in range(max(map(len, TRAINING.values()))):
        rng = random.Random(seed + group)
        pools = []
        for name, groups in TRAINING.items():
            templates, subjects = groups[group]
            pool = [(name, t.format(s)) for t, s in product(templates, split(subjects))]
            rng.shuffle(pool)
            pools.append(pool)
        out += [pool[i] for i in range(max(map(len, pools))) for pool in pools if i < len(pool)]
    return out[:count]


def held_out_prompts(per_class: int = 10) -> list[tuple[str, str]]:
    """The first `per_class` held-out prompts of each class, as (class, prompt) pairs."""
    return [(name, prompt) for name, prompts in HELD_OUT.items() for prompt in prompts[:per_class]]


def split(subjects: str) -> list[str]:
    return [s.strip() for line in subjects.splitlines() for s in line.split("|")]
