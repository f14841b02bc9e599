"""Question and answer: turns of a conversation, the answers in a helpful assistant's set phrases.

A conversation stays with one topic, so that what was said before tells what comes next.
"""

import random
from dataclasses import dataclass

CAPITALS = {
    "Austria": "Vienna", "Brazil": "Brasilia", "Canada": "Ottawa", "Chile": "Santiago",
    "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens",
    "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi", "Ireland": "Dublin",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Mexico": "Mexico City",
    "Nepal": "Kathmandu", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Spain": "Madrid", "Sweden": "Stockholm", "Turkey": "Ankara",
}  # fmt: skip
DISHES = {
    "tomato soup": "tomatoes, an onion, garlic, olive oil and basil",
    "pancakes": "flour, milk, two eggs, butter and a pinch of salt",
    "fried rice": "cooked rice, eggs, peas, carrots and soy sauce",
    "a green salad": "lettuce, cucumber, parsley, lemon juice and olive oil",
    "potato stew": "potatoes, carrots, an onion, stock and pepper",
    "banana bread": "ripe bananas, flour, sugar, butter and baking powder",
    "lentil curry": "red lentils, coconut milk, ginger, cumin and turmeric",
    "an omelette": "three eggs, butter, cheese and chives",
    "bean chili": "beans, tomatoes, peppers, an onion and cumin",
}
HABITS = {
    "sleep better": (
        "go to bed at the same time every day", "keep your bedroom dark and cool",
        "avoid coffee after lunch", "put your phone away an hour before bed",
    ),
    "learn a language": (
        "practise a little every day", "listen to songs and podcasts",
        "write down new words", "speak with other people as often as you can",
    ),
    "save money": (
        "write down what you spend", "cook at home more often",
        "cancel what you do not use", "set a small amount aside every month",
    ),
    "write better code": (
        "give things clear names", "keep functions short",
        "write a test before you fix a bug", "read code that others have written",
    ),
    "get fit": (
        "start with a short walk every day", "take the stairs instead of the lift",
        "find a sport that you enjoy", "rest when your body needs it",
    ),
    "read more books": (
        "carry a book wherever you go", "read a few pages before you sleep",
        "stop reading what bores you", "join a book club",
    ),
    "grow tomatoes": (
        "choose a sunny place", "water the roots and not the leaves",
        "tie the stems to a stick", "pick the fruit when it is red",
    ),
}  # fmt: skip
MEANINGS = {
    "photosynthesis": "how plants use light to turn water and carbon dioxide into sugar and oxygen",
    "gravity": "the force that pulls things with mass towards each other",
    "inflation": "a general rise in prices, so that money buys less than before",
    "a compiler": "a program that translates source code into machine code",
    "evaporation": "the change of a liquid into a gas at its surface",
    "democracy": "a form of government in which the people choose their leaders",
    "an eclipse": "what we see when one body in space moves into the shadow of another",
    "a database": "an organized collection of data that programs can search and change",
    "recursion": "a way to solve a problem by solving smaller cases of the same problem",
    "erosion": "the slow wearing away of rock and soil by wind and water",
}
OPENINGS = ("Sure!", "Of course.", "Good question.", "Happy to help.", "Certainly.", "")
CLOSINGS = (
    "Let me know if you have any other questions.", "I hope that helps!",
    "Would you like to know more?", "Feel free to ask if anything is unclear.", "",
)  # fmt: skip
NAMES = (
    "Anna", "Boris", "Carla", "David", "Emma", "Frank", "Hanna", "Ivan", "Julia", "Karim",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
THANKS = ("Thanks!", "Thank you.", "Great, thanks a lot!", "That helps, thank you.")
WELCOMES = ("You're welcome!", "You're welcome. Have a nice day!", "Any time!", "My pleasure.")


def chat(random: random.Random) -> str:
    """A conversation of one to four exchanges."""
    topic = random.choice((_capitals, _dish, _advice, _meaning, _email))
    turns = topic(random, Manner(random.choice(OPENINGS), random.choice(CLOSINGS)))
    if random.random() < 0.5:
        turns.append((random.choice(THANKS), random.choice(WELCOMES)))
    return "\n".join(f"User: {asked}\nAssistant: {said}" for asked, said in turns)


Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Manner:
    """How the assistant starts and ends its answers, the same all through a conversation."""

    opening: str
    closing: str

    def answer(self, text: str) -> str:
        """`text` said in this manner."""
        return " ".join(filter(None, (self.opening, text, self.closing)))


def _capitals(random: random.Random, manner: Manner) -> Turns:
    turns = []
    for number, country in enumerate(random.sample(sorted(CAPITALS), random.randint(1, 3))):
        asked = random.choice(
            (f"What is the capital of {country}?", f"Which city is the capital of {country}?")
            if number == 0
            else (f"And what is the capital of {country}?", f"And of {country}?")
        )
        said = f"The capital of {country} is {CAPITALS[country]}."
        turns.append((asked, manner.answer(said)))
    return turns


def _dish(random: random.Random, manner: Manner) -> Turns:
    dish = random.choice(sorted(DISHES))
    minutes, people = random.choice(range(10, 65, 5)), random.randint(2, 8)
    turns = [
        (
            random.choice((f"How do I make {dish}?", f"I want to cook {dish}. What do I need?")),
            manner.answer(f"For {dish} you need {DISHES[dish]}."),
        ),
        (
            random.choice(("How long does it take?", "How much time will I need?")),
            f"It takes about {minutes} minutes to make {dish}.",
        ),
        (
            f"Is that enough for {people} people?",
            random.choice(
                (
                    f"For {people} people I would double the amounts.",
                    f"Yes, that is enough for {people} people.",
                )
            ),
        ),
    ]
    return turns[: random.randint(1, 3)]


def _advice(random: random.Random, manner: Manner) -> Turns:
    goal = random.choice(sorted(HABITS))
    tips = random.sample(HABITS[goal], random.randint(2, 4))
    listed = "\n".join(f"{n}. {tip[0].upper()}{tip[1:]}." for n, tip in enumerate(tips, 1))
    asked = random.choice(
        (f"How can I {goal}?", f"Do you have any tips to {goal}?", f"I would like to {goal}.")
    )
    turns = [
        (
            asked,
            manner.answer(f"Here are {len(tips)} tips to {goal}:\n{listed}\n")
            .replace("\n ", "\n")
            .strip(),
        )
    ]
    if random.random() < 0.5:
        first = random.choice(tips)
        turns.append(
            ("Which one should I try first?", f"I would {first}. It is the easiest one to start.")
        )
    return turns


def _meaning(random: random.Random, manner: Manner) -> Turns:
    turns = []
    for word in random.sample(sorted(MEANINGS), random.randint(1, 2)):
        asked = random.choice(
            (f"What is {word}?", f"Can you explain {word} to me?", f"What does {word} mean?")
        )
        said = f"{word[0].upper()}{word[1:]} is {MEANINGS[word]}."
        turns.append((asked, manner.answer(said)))
    return turns


def _email(random: random.Random, _manner: Manner) -> Turns:
    name = random.choice(NAMES)
    day = random.choice(DAYS)
    hour = random.randint(8, 17)
    matter = random.choice(("the meeting", "our lunch", "the interview", "the review", "the call"))
    said = (
        f"Dear {name},\nI am sorry, but I cannot make {matter} on {day}. "
        f"Could we move it to {hour} o'clock on the next day?\nKind regards"
    )
    turns = [(f"Write a short email to {name} to move {matter} on {day}.", said)]
    if random.random() < 0.5:
        turns.append(("Make it shorter.", f"Dear {name},\ncan we move {matter} by a day?\nThanks!"))
    return turns
