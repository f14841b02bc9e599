"""Word problems with worked answers: numbers that follow from the question, in set phrases."""

import random

NAMES = (
    "Ada", "Ben", "Chloe", "Daniel", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira",
    "Liam", "Mei", "Noah", "Olga", "Pablo", "Quinn", "Rosa", "Samir", "Tara", "Umar", "Vera",
    "Wendy", "Xavier", "Yuki", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "books", "candles", "coins", "eggs", "flowers", "kites", "lemons", "marbles",
    "oranges", "pears", "pencils", "plums", "shells", "stamps", "stickers", "tickets", "toys",
)  # fmt: skip
PLACES = ("at the market", "in a shop", "from a friend", "at school", "in the garden")


def word_problem(random: random.Random) -> str:
    """One problem, its working and its answer."""
    kind = random.choice((_shop, _change, _share, _travel, _percentage, _rectangle, _equation))
    question, steps, answer = kind(random)
    worked = "\n".join(f"Step {n}: {step}" for n, step in enumerate(steps, 1))
    return f"Problem: {question}\n{worked}\nAnswer: {answer}"


Problem = tuple[str, list[str], str]


def _shop(random: random.Random) -> Problem:
    name, (first, second) = random.choice(NAMES), random.sample(THINGS, 2)
    n, m, p, q = (random.randint(2, 9) for _ in range(4))
    question = (
        f"{name} buys {n} {first} for {p} dollars each and {m} {second} for {q} dollars each. "
        f"How much does {name} pay?"
    )
    steps = [
        f"The {first} cost {n} * {p} = {n * p} dollars.",
        f"The {second} cost {m} * {q} = {m * q} dollars.",
        f"Together that is {n * p} + {m * q} = {n * p + m * q} dollars.",
    ]
    return question, steps, f"{n * p + m * q} dollars"


def _change(random: random.Random) -> Problem:
    name, other = random.sample(NAMES, 2)
    thing, place = random.choice(THINGS), random.choice(PLACES)
    start, more = random.randint(5, 40), random.randint(2, 30)
    less = random.randint(1, start + more - 1)
    question = (
        f"{name} has {start} {thing} and gets {more} more {place}. Then {name} gives {less} "
        f"to {other}. How many {thing} does {name} have left?"
    )
    steps = [
        f"After getting more, {name} has {start} + {more} = {start + more} {thing}.",
        f"After giving some to {other}, {name} has {start + more} - {less} = "
        f"{start + more - less} {thing}.",
    ]
    return question, steps, f"{start + more - less} {thing}"


def _share(random: random.Random) -> Problem:
    thing, people, each = random.choice(THINGS), random.randint(2, 9), random.randint(2, 12)
    rest = random.randint(0, people - 1)
    total = people * each + rest
    question = (
        f"{total} {thing} are shared equally among {people} children. "
        f"How many does each child get, and how many are left over?"
    )
    steps = [
        f"{people} * {each} = {people * each}, which is the most that fits into {total}.",
        f"Each child gets {each} {thing}.",
        f"What is left over is {total} - {people * each} = {rest}.",
    ]
    return question, steps, f"{each} each, {rest} left over"


def _travel(random: random.Random) -> Problem:
    what = random.choice(("train", "car", "bus", "ship", "cyclist"))
    speed, hours = random.choice(range(10, 125, 5)), random.randint(2, 9)
    question = f"A {what} moves at {speed} km per hour for {hours} hours. How far does it go?"
    steps = [
        "Distance is speed times time.",
        f"{speed} * {hours} = {speed * hours} km.",
    ]
    return question, steps, f"{speed * hours} km"


def _percentage(random: random.Random) -> Problem:
    thing = random.choice(("coat", "bicycle", "lamp", "phone", "table", "guitar"))
    price, off = random.choice(range(20, 420, 20)), random.choice((5, 10, 20, 25, 50))
    cut = price * off // 100
    question = f"A {thing} costs {price} dollars. Its price falls by {off}%. What is the new price?"
    steps = [
        f"{off}% of {price} is {price} * {off} / 100 = {cut} dollars.",
        f"The new price is {price} - {cut} = {price - cut} dollars.",
    ]
    return question, steps, f"{price - cut} dollars"


def _rectangle(random: random.Random) -> Problem:
    what = random.choice(("garden", "room", "field", "poster", "playground"))
    a, b = random.randint(3, 20), random.randint(3, 20)
    question = (
        f"A rectangular {what} is {a} metres long and {b} metres wide. "
        f"What are its area and its perimeter?"
    )
    steps = [
        f"The area is {a} * {b} = {a * b} square metres.",
        f"The perimeter is 2 * ({a} + {b}) = 2 * {a + b} = {2 * (a + b)} metres.",
    ]
    return question, steps, f"area {a * b} square metres, perimeter {2 * (a + b)} metres"


def _equation(random: random.Random) -> Problem:
    letter = random.choice("abcnxyz")
    a, x, b = random.randint(2, 9), random.randint(1, 15), random.randint(1, 30)
    question = f"Solve {a}{letter} + {b} = {a * x + b} for {letter}."
    steps = [
        f"Subtract {b} from both sides: {a}{letter} = {a * x + b} - {b} = {a * x}.",
        f"Divide both sides by {a}: {letter} = {a * x} / {a} = {x}.",
    ]
    return question, steps, f"{letter} = {x}"
