"""Records for machines: JSON, tables, logs and settings.

The form is certain. The values are uncertain at first; but each document draws them from a few of
its own, so that a model that looks back over the document foresees what a smaller one cannot.
"""

import json
import random

FIRST = (
    "Amir", "Bea", "Cem", "Dora", "Eli", "Fay", "Gus", "Hana", "Ida", "Jack", "Kim", "Lea", "Max",
    "Nia", "Otto", "Pia", "Ray", "Sue", "Tom", "Una",
)  # fmt: skip
LAST = (
    "Adams", "Baker", "Clark", "Diaz", "Evans", "Fisher", "Garcia", "Hughes", "Ivanov", "Jones",
    "Khan", "Lopez", "Meyer", "Novak",
)  # fmt: skip
CITIES = (
    "Berlin", "Boston", "Cairo", "Delhi", "Lagos", "Lima", "London", "Madrid", "Osaka", "Oslo",
    "Paris", "Perth", "Rome", "Seoul",
)  # fmt: skip
ITEMS = (
    "bolt", "cable", "clamp", "drill", "fan", "gear", "hinge", "lamp", "motor", "nail", "panel",
    "pump", "relay", "screw", "valve",
)  # fmt: skip
SERVICES = (
    "api", "auth", "billing", "cache", "gateway", "mailer", "orders", "search", "storage",
    "worker",
)  # fmt: skip
STATES = ("active", "inactive", "pending", "suspended")
PATHS = ("/health", "/login", "/metrics", "/v1/items", "/v1/orders", "/v1/users", "/v1/search")
EVENTS = (
    ("INFO", "started in {} ms"),
    ("INFO", "request completed in {} ms"),
    ("INFO", "connection opened, {} in use"),
    ("DEBUG", "cache hit for key {}"),
    ("DEBUG", "retry scheduled in {} ms"),
    ("WARN", "queue length is {}"),
    ("WARN", "slow query took {} ms"),
    ("ERROR", "request failed with status {}"),
)


def structured(random: random.Random) -> str:
    """A document of one form, of several records."""
    form = random.choice((_users, _orders, _csv, _table, _log, _access_log, _settings))
    return form(random)


def _users(random: random.Random) -> str:
    start = random.randint(1, 900)
    cities, states = random.sample(CITIES, 3), random.sample(STATES, 2)
    last = random.sample(LAST, 3)
    oldest = random.randint(30, 80)
    users = [
        {
            "id": start + n,
            "name": f"{random.choice(FIRST)} {random.choice(last)}",
            "city": random.choice(cities),
            "age": oldest - random.randint(0, 4),
            "status": random.choice(states),
            "admin": random.random() < 0.1,
        }
        for n in range(random.randint(3, 8))
    ]
    return json.dumps({"users": users, "count": len(users)}, indent=2)


def _orders(random: random.Random) -> str:
    start = random.randint(1000, 9000)
    prices = {item: random.randint(1, 99) for item in random.sample(ITEMS, 4)}
    lines = []
    for n in range(random.randint(5, 14)):
        item, quantity = random.choice(sorted(prices)), random.randint(1, 9)
        lines.append(
            json.dumps(
                {
                    "order": start + n,
                    "item": item,
                    "quantity": quantity,
                    "price": prices[item],
                    "total": quantity * prices[item],
                    "paid": random.random() < 0.8,
                }
            )
        )
    return "\n".join(lines)


def _csv(random: random.Random) -> str:
    lines = ["date,city,temperature,humidity,wind"]
    month = random.randint(1, 12)
    city = random.choice(CITIES)
    temperature = random.randint(-5, 30)
    humidity = random.sample(range(30, 95), 4)
    wind = random.sample(range(5, 40), 3)
    for day in range(1, random.randint(8, 24)):
        temperature += random.randint(-2, 2)
        lines.append(
            f"2024-{month:02}-{day:02},{city},{temperature},{random.choice(humidity)},"
            f"{random.choice(wind)}"
        )
    return "\n".join(lines)


def _table(random: random.Random) -> str:
    prices, shelves = random.sample(range(1, 99), 3), random.sample("ABCDEFGH", 2)
    lines = ["| item   | stock | price | shelf |", "|--------|-------|-------|-------|"]
    for item in random.sample(ITEMS, random.randint(5, 14)):
        stock, price = 10 * random.randint(1, 9), random.choice(prices)
        shelf = f"{random.choice(shelves)}{random.randint(1, 3)}"
        lines.append(f"| {item:<6} | {stock:>5} | {price:>5} | {shelf:<5} |")
    return "\n".join(lines)


def _log(random: random.Random) -> str:
    second = random.randint(0, 80_000)
    month, day = random.randint(1, 12), random.randint(1, 28)
    service, events = random.choice(SERVICES), random.sample(EVENTS, 4)
    numbers = [random.randint(1, 999) for _ in range(3)]
    lines = []
    for _ in range(random.randint(8, 20)):
        second += random.choice((0, 0, 1, 1, 2, 5))
        level, event = random.choice(events)
        lines.append(
            f"2024-{month:02}-{day:02} {_clock(second)} {level:<5} [{service}] "
            + event.format(random.choice(numbers))
        )
    return "\n".join(lines)


def _access_log(random: random.Random) -> str:
    second = random.randint(0, 80_000)
    address = f"10.0.{random.randint(0, 9)}"
    hosts, sizes = random.sample(range(1, 99), 3), random.sample(range(100, 9999), 3)
    paths = random.sample(PATHS, 3)
    lines = []
    for _ in range(random.randint(8, 18)):
        second += random.randint(0, 4)
        status = random.choice((200, 200, 200, 200, 201, 304, 404, 500))
        lines.append(
            f"{address}.{random.choice(hosts)} - - [12/Mar/2024:{_clock(second)} +0000] "
            f'"{random.choice(("GET", "GET", "POST"))} {random.choice(paths)} HTTP/1.1" '
            f"{status} {random.choice(sizes)}"
        )
    return "\n".join(lines)


def _settings(random: random.Random) -> str:
    lines = ["services:"]
    release = f"{random.randint(1, 4)}.{random.randint(0, 20)}"
    port = random.randint(3000, 9999)
    for service in random.sample(SERVICES, random.randint(2, 5)):
        port += 1
        lines += [
            f"  {service}:",
            f"    image: registry.local/{service}:{release}",
            f"    replicas: {random.randint(1, 9)}",
            f"    port: {port}",
            f"    health: http://{service}:{port}/health",
            f"    debug: {random.choice(('true', 'false', 'false'))}",
        ]
    return "\n".join(lines)


def _clock(second: int) -> str:
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
