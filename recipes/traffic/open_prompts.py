"""General prompts, written by hand: chat, code, summaries, questions over a text, translation.

A string is one user turn; a list is a dialogue (user, assistant, user, ...); its last turn is to be answered.
No text of the held-out part occurs in the training part.
"""

from __future__ import annotations

Prompt = str | list[str]
Prompts = dict[str, list[Prompt]]

CHAT_TRAIN: list[Prompt] = [
    "What is a good way to learn the names of thirty new pupils in a week?",
    "Give me three ideas for a rainy afternoon with two small children.",
    "Why does bread go stale faster in the fridge?",
    "I have to give a toast at my sister's wedding and I am nervous. Any advice?",
    "Explain to a ten-year-old why the moon changes its shape.",
    "Write a short poem about a lighthouse keeper who likes jazz.",
    "What should I check before I buy a used bicycle?",
    "Name four vegetables that grow well in the shade and say why.",
    "How do I politely tell my neighbour that his music is too loud at night?",
    "What is the difference between weather and climate?",
    "Suggest a name for a bakery that only opens at night, with one sentence why.",
    "How can I fall asleep more easily when my head is full of work?",
    "Write a two-line slogan for a shop that repairs umbrellas.",
    [
        "I want to start running. How often should I go?",
        "Three times a week with a day of rest in between is a good start.",
        "And what should I do on the days of rest?",
    ],
    [
        "Can you recommend a plant for a dark hallway?",
        "A cast-iron plant does well with little light and little water.",
        "How often do I have to water it in winter?",
    ],
    [
        "What is the capital of Australia?",
        "The capital of Australia is Canberra.",
        "Why is it not Sydney?",
    ],
    [
        "Help me plan a small dinner for four friends.",
        "With pleasure. Is there anything your friends do not eat?",
        "One of them eats no meat. Please suggest a starter, a main dish and a dessert.",
    ],
    [
        "My phone battery is empty by noon.",
        "That is annoying. Is the phone older than three years?",
        "Yes, four years. What can I do?",
        "A new battery often helps, and so does a darker screen.",
        "Which of the two should I try first?",
    ],
]

CHAT_HELDOUT: list[Prompt] = [
    "What are two advantages and two drawbacks of living on a houseboat?",
    "My cat wakes me at five every morning. How do I change that?",
    "Tell me a short story about a clock that runs backwards on Thursdays.",
    [
        "I would like to read more. Where do I begin?",
        "Choose one short book on a subject you already enjoy.",
        "I enjoy the sea. What kind of book would fit?",
    ],
    [
        "How long do I boil an egg?",
        "About six minutes for a soft yolk, ten for a hard one.",
        "And if the egg comes straight from the fridge?",
    ],
]

CODE_TRAIN: list[Prompt] = [
    "Write a Python function that returns the second largest number in a list.",
    "Write a Python function that counts the vowels in a string.",
    "Write a shell command that finds all files larger than 100 MB in the current folder.",
    "What does this return?\n\ndef f(n):\n    return [i * i for i in range(n) if i % 2]\n\nprint(f(6))",
    (
        "Rename the variable x to price in this code:\n\ndef total(items):\n"
        "    s = 0\n    for x in items:\n        s += x * 1.2\n    return s"
    ),
    ("Add a docstring to this function:\n\ndef clamp(value, low, high):\n    return max(low, min(value, high))"),
    "Write a Python class Stack with the methods push, pop and is_empty.",
    (
        "Add type hints to this function:\n\n"
        "def join_names(first, last, upper=False):\n"
        "    name = first + ' ' + last\n"
        "    return name.upper() if upper else name"
    ),
    "Write an SQL query that lists the five most expensive products of a table products(name, price).",
    (
        "Convert this loop to a list comprehension:\n\nlengths = []\n"
        "for word in words:\n    if word:\n        lengths.append(len(word))"
    ),
    "Write a JavaScript function that reverses a string.",
    "Why does this Python code fail?\n\nnames = ('Ann', 'Bob')\nnames[0] = 'Eve'",
    "Write a regular expression for a date such as 2024-03-17 and explain each part.",
    ("Repeat this function with the bug fixed:\n\ndef average(numbers):\n    return sum(numbers) / len(number)"),
    "Write an HTML page with a heading, one paragraph and a list of three fruits.",
    [
        "Write a Python function that doubles every number in a list.",
        "def double(numbers):\n    return [2 * n for n in numbers]",
        "Change it so that it leaves negative numbers as they are.",
    ],
    [
        "How do I read a text file in Python?",
        "with open('notes.txt') as file:\n    text = file.read()",
        "And how do I read it line by line?",
    ],
]

CODE_HELDOUT: list[Prompt] = [
    "Write a Python function that tells whether a word is a palindrome.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    (
        "Add a docstring to this function:\n\ndef mirror(point, axis):\n"
        "    x, y = point\n    return (x, -y) if axis == 'x' else (-x, y)"
    ),
    "Repeat this function with the bug fixed:\n\ndef greet(name):\n    print('Hello, ' + nam + '!')",
    [
        "Write a Python function that adds two numbers.",
        "def add(a, b):\n    return a + b",
        "Now write one that adds any count of numbers.",
    ],
]

# A passage gives one row to summarise and one question that its own words answer ("?" starts the question).
PASSAGES_TRAIN = """
The old ferry at Harlow was built in 1931 and carried carts and horses across the river. When the bridge
opened in 1964 the ferry was kept for walkers, and today volunteers run it on Sundays from May to October.
? When do volunteers run the ferry?

Barn owls hunt at dusk and find mice by sound alone. Their ears sit at different heights, so a noise from
below reaches one ear slightly earlier than the other. Soft feathers keep their flight almost silent.
? How do barn owls find mice?

The town library closes its reading room for repairs from 3 March to 18 April. Books can still be borrowed
at the side entrance on Mill Street, and the story hour for children moves to the town hall.
? Where can books be borrowed during the repairs?

Sourdough needs no bought yeast. Flour and water are left in a jar for about a week, and wild yeast from the
flour begins to raise the mixture. A spoonful of it is kept back each time to start the next loaf.
? Why is a spoonful kept back each time?

The tram line 7 was extended to the harbour last autumn. In its first six months the new stretch carried
twice as many passengers as expected, so the company now plans to run trams every eight minutes instead of
every twelve.
? How often will trams run in the future?

Mrs. Adler left her garden to the village on one condition: nobody may ever charge for entry. The village
agreed, and pays for the gardener by selling seedlings in spring and apples in autumn.
? On what condition did Mrs. Adler leave her garden to the village?

A glacier in the northern valley has lost forty metres of length a year since 2005. Below it a new lake has
formed, held back by loose rock, and engineers have dug a channel so that it cannot flood the farms.
? Why have engineers dug a channel?

The bakery on Pine Road sells bread from the day before at half price. The owner says that this halved the
waste within a year, and that students now come early in the morning to get the best loaves.
? Who comes early in the morning?

Cork is the bark of an oak that grows around the western Mediterranean. It is peeled off by hand every nine
years without felling the tree, and an oak may be harvested for two hundred years.
? How often is the bark peeled off?

Our office moves on 12 June. Please pack your desk into the blue boxes by noon on 11 June and label each box
with your name and room number. Computers stay on the desks; the movers will carry them separately.
? What should be written on each box?

In 1858 a clerk named Thomas Reed began to note the height of the tide at the pier every day. He kept on for
thirty-one years, and his notebooks are now used to study how the sea level has changed.
? What are the notebooks used for now?

Hedgehogs sleep through the winter in piles of leaves. Before lighting a bonfire, gardeners should move the
pile to another place, because a sleeping hedgehog cannot run from the fire.
? What should gardeners do before lighting a bonfire?

The radio play Night Train was recorded in a single evening with four actors and a piano. The sound of the
wheels was made with a typewriter, which the director's daughter struck in time with the music.
? How was the sound of the wheels made?

Salt was once so precious in the hills that villages paid the doctor with it. Mules brought it from the
coast over three passes, and the journey took eleven days in summer and could not be made in winter.
? How long did the journey take in summer?

The swimming pool will open one hour later on weekdays because two lifeguards have left. The evening course
for beginners is not affected. The pool hopes to return to its usual hours in September.
? Why will the pool open one hour later?

Paper was made from rags until about 1850. As more people learned to read there were not enough rags, and
mills turned to wood, which was cheap but gave a paper that yellows with age.
? Why did mills turn to wood?
"""

PASSAGES_HELDOUT = """
The lighthouse on Gull Rock has had no keeper since 1988. Its lamp is switched by a sensor, and a technician
comes by boat twice a year to clean the glass and to change the batteries.
? How often does a technician come?

A school in the south lets its pupils begin at half past nine. After one year teachers report fewer late
arrivals and better marks in mathematics, while some parents complain that the days end too late.
? What do some parents complain about?

Bees tell each other where flowers are by dancing on the comb. The angle of the dance shows the direction
from the sun, and the number of turns shows how far they have to fly.
? What does the angle of the dance show?

The market on Castle Square moves to the car park behind the station while the square is paved. The stalls
open at seven as before, and the fish van comes on Wednesdays only.
? When does the fish van come?
"""

TRANSLATE_TRAIN: list[Prompt] = [
    "Translate into French: The train leaves at nine o'clock.",
    "Translate into Spanish: My brother works in a small hospital.",
    "Translate into German: Where is the nearest pharmacy?",
    "Translate into Italian: We would like a table for two, please.",
    "Translate into French: The children are playing in the garden with the dog.",
    "Translate into Spanish: It has been raining since this morning.",
    "Translate into German: I am learning to play the piano.",
    "Translate into English: La maison est près de la mer.",
    "Translate into English: El libro está sobre la mesa.",
    "Translate into English: Der Zug nach Hamburg ist heute leider verspätet.",
    "Translate into Portuguese: Good morning, how much is this coffee?",
    "Translate into French: I lost my key and cannot open the door.",
    "Translate into Spanish these three words: winter, bridge, window.",
    "Translate into English: Il gatto dorme sotto la sedia.",
    "Translate into German: Please send me the bill by e-mail.",
    [
        "Translate into French: a red car",
        "une voiture rouge",
        "Translate into French: a white house with a blue door",
    ],
    [
        "Translate into Spanish: Good night.",
        "Buenas noches.",
        "Translate into Spanish: Good night and see you tomorrow, my friends.",
    ],
]

TRANSLATE_HELDOUT: list[Prompt] = [
    "Translate into French: My sister bought two tickets for the concert.",
    "Translate into Spanish: The kitchen is next to the bathroom.",
    "Translate into English: Das Wetter wird morgen wieder schön.",
    [
        "Translate into German: the big tree",
        "der große Baum",
        "Translate into German: the big tree behind our house",
    ],
]


def _passages(block: str) -> list[tuple[str, str]]:
    """(text, question) of every paragraph of ``block``."""
    pairs = (paragraph.split("\n? ") for paragraph in block.strip().split("\n\n"))
    return [(text.replace("\n", " "), question) for text, question in pairs]


def _prompts(chat: list[Prompt], code: list[Prompt], passages: str, translate: list[Prompt]) -> Prompts:
    pairs = _passages(passages)
    return {
        "chat": chat,
        "code": code,
        "summarise": [f"Summarise this text in one sentence.\n\n{text}" for text, _ in pairs],
        "grounded_qa": [f"{text}\n\nAnswer with the words of the text: {question}" for text, question in pairs],
        "translate": translate,
    }


TRAIN = _prompts(CHAT_TRAIN, CODE_TRAIN, PASSAGES_TRAIN, TRANSLATE_TRAIN)
HELDOUT = _prompts(CHAT_HELDOUT, CODE_HELDOUT, PASSAGES_HELDOUT, TRANSLATE_HELDOUT)
