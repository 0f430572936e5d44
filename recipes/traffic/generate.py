"""Writes the traffic that ships with the recipes: ``python recipes/traffic/generate.py [folder]``.

``narrow_*`` stands for the production traffic of one service: four kinds of requests, three templates each,
filled with slots. ``open_*`` is general traffic, written by hand (``open_prompts.py``). Rows are prompts: the
last message is the user's, and the answers are left to the target. One seed: each run writes the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_prompts import HELDOUT, TRAIN, Prompts

SEED = 20250
TRAIN_PER_TEMPLATE = 35
HELDOUT_PER_KIND = 8

Row = dict[str, Any]
Slots = dict[str, Any]


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


FIRST = words("Ana, Bruno, Clara, Dario, Elena, Felix, Greta, Hugo, Irene, Jonas, Karin, Luca, Marta, Nils, Olga")
LAST = words("Alder, Berg, Castro, Dunn, Egger, Fonseca, Gruber, Hale, Ibsen, Jensen, Keller, Lopez, Moreau, Novak")
CITIES = words("Lisbon, Oslo, Vienna, Porto, Turin, Ghent, Krakow, Bilbao, Malmo, Zagreb, Lyon, Bern, Tallinn, Cork")
DAYS = words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday")
MONTHS = words("January, February, March, April, May, June, July, August, September, October, November, December")
GOODS = words(
    "olive oil, green tea, oak shelf, desk lamp, rye bread, wool blanket, garden chair, paper box, glass jar,"
    "tile glue, copper pipe, coffee beans, rain coat, steel bolt, wall paint, honey jar"
)
DEVICES = words("laptop, printer, camera, phone, heater, bicycle, radio, toaster")
FAULTS = words("no power, cracked screen, loud noise, loose cable, slow start, water damage, smell of smoke")
PAPERS = words("invoice, contract, receipt, price list, delivery note, report, drawing")
REASONS = words("the truck broke down, the road was closed, the stock ran out, the boat was late, the bridge was shut")
TOPICS = words("budget, new office, website, contract, summer fair, training plan, audit")
JOBS = words("driver, clerk, cook, nurse, welder, guide")


@dataclass(frozen=True)
class Template:
    """A request with slots. A worked example precedes it in the prompt: answers become short and regular."""

    kind: str
    name: str
    system: str
    request: str  # a format string over the slots
    slots: dict[str, Sequence[Any]]  # the values that each slot may take
    example: Slots  # values outside the slots' own
    answer: str  # to the example, word for word

    def messages(self, slots: Slots) -> list[dict[str, str]]:
        turns = (
            ("system", self.system),
            ("user", self.request.format(**self.example)),
            ("assistant", self.answer),
            ("user", self.request.format(**slots)),
        )
        return [{"role": role, "content": content} for role, content in turns]

    def row(self, slots: Slots) -> Row:
        return {"kind": f"narrow/{self.kind}", "template": self.name, "slots": slots, "messages": self.messages(slots)}

    def draw(self, rng: random.Random, count: int) -> list[Slots]:
        """``count`` slot combinations, no two alike: train and held-out rows share none."""
        drawn: dict[str, Slots] = {}
        while len(drawn) < count:
            slots = {name: rng.choice(values) for name, values in self.slots.items()}
            drawn.setdefault(json.dumps(slots), slots)
        return list(drawn.values())


TEMPLATES = [
    Template(
        "fields_to_json",
        "booking",
        "Write the booking as JSON.",
        "Name: {first} {last}. Arrival: {day} {month}. Room: {room}. Nights: {nights}. Breakfast: {breakfast}.",
        {
            "first": FIRST,
            "last": LAST,
            "day": range(1, 29),
            "month": MONTHS,
            "room": ["single", "double", "king", "family"],
            "nights": range(1, 10),
            "breakfast": ["yes", "no"],
        },
        {
            "first": "Ida",
            "last": "Stone",
            "day": 30,
            "month": "May",
            "room": "double",
            "nights": 3,
            "breakfast": "yes",
        },
        '{\n  "name": "Ida Stone",\n  "arrival": "30 May",\n  "room": "double",\n  "nights": 3,\n'
        '  "breakfast": true\n}',
    ),
    Template(
        "fields_to_json",
        "order",
        "Write the order as JSON.",
        "Order {order}: {quantity} x {item} to {city} on {day}.",
        {"order": range(1000, 10000), "quantity": range(2, 41), "item": GOODS, "city": CITIES, "day": DAYS},
        {"order": 512, "quantity": 6, "item": "red apple", "city": "Rome", "day": "Sunday"},
        '{\n  "order": 512,\n  "item": "red apple",\n  "quantity": 6,\n  "city": "Rome",\n  "delivery": "Sunday"\n}',
    ),
    Template(
        "fields_to_json",
        "repair",
        "Write the repair as JSON.",
        "Customer: {first} {last}. Device: {device}. Fault: {fault}. Pickup: {day}. Price: {price}.",
        {
            "first": FIRST,
            "last": LAST,
            "device": DEVICES,
            "fault": FAULTS,
            "day": DAYS,
            "price": range(20, 300, 5),
        },
        {
            "first": "Ida",
            "last": "Stone",
            "device": "clock",
            "fault": "bent hand",
            "day": "Sunday",
            "price": 15,
        },
        '{\n  "customer": "Ida Stone",\n  "device": "clock",\n  "fault": "bent hand",\n'
        '  "pickup": "Sunday",\n  "price": 15\n}',
    ),
    Template(
        "formal_rewrite",
        "request",
        "Rewrite the note formally.",
        "Note: {name}, pls send the {paper} for the {item} by {day}, thx",
        {"name": LAST, "paper": PAPERS, "item": GOODS, "day": DAYS},
        {"name": "Stone", "paper": "map", "item": "red apple", "day": "Sunday"},
        "Formal letter:\nDear Stone,\nplease send us the map for the red apple by Sunday.\n"
        "Thank you for your help.\nKind regards,\nthe Sales Team.",
    ),
    Template(
        "formal_rewrite",
        "delay",
        "Rewrite the note formally.",
        "Note: {name}, ur {item} comes {day}, {reason}, sorry",
        {"name": LAST, "item": GOODS, "day": DAYS, "reason": REASONS},
        {"name": "Stone", "item": "red apple", "day": "Sunday", "reason": "the shop was shut"},
        "Formal letter:\nDear Stone,\n"
        "we regret that your red apple will arrive on Sunday, because the shop was shut.\n"
        "Please accept our apologies.\nKind regards,\nthe Delivery Team.",
    ),
    Template(
        "formal_rewrite",
        "meeting",
        "Rewrite the note formally.",
        "Note: {name}, no {topic} meeting {day}, lets do {other} at {hour}",
        {"name": LAST, "topic": TOPICS, "day": DAYS, "other": DAYS, "hour": range(8, 18)},
        {"name": "Stone", "topic": "garden", "day": "Sunday", "other": "Friday", "hour": 7},
        "Formal letter:\nDear Stone,\nthe garden meeting on Sunday is cancelled.\n"
        "We propose to meet on Friday at 7 instead.\nKind regards,\nthe Office.",
    ),
    Template(
        "step_amount",
        "basket",
        "Calculate the amount step by step.",
        "{n} x {item} at {price} euros each, delivery {fee} euros.",
        {"n": range(2, 10), "item": GOODS, "price": range(2, 21), "fee": range(3, 16)},
        {"n": 3, "item": "red apple", "price": 10, "fee": 5},
        "Step 1: The price of the red apple is 3 x 10 = 30 euros.\n"
        "Step 2: With the delivery it is 30 + 5 = 35 euros.\nTotal: 35 euros",
    ),
    Template(
        "step_amount",
        "labour",
        "Calculate the amount step by step.",
        "{name} worked {hours} hours at {rate} euros an hour and used parts for {parts} euros.",
        {"name": FIRST, "hours": range(2, 10), "rate": [15, 20, 25, 30, 40, 50], "parts": range(10, 130, 10)},
        {"name": "Ida", "hours": 3, "rate": 10, "parts": 5},
        "Step 1: The work of Ida costs 3 x 10 = 30 euros.\n"
        "Step 2: With the parts it is 30 + 5 = 35 euros.\nTotal: 35 euros",
    ),
    Template(
        "step_amount",
        "voucher",
        "Calculate the amount step by step.",
        "{n} x {item} at {price} euros each, voucher of {off} euros.",
        {"n": range(3, 10), "item": GOODS, "price": range(5, 21), "off": range(2, 13)},
        {"n": 3, "item": "red apple", "price": 10, "off": 5},
        "Step 1: The price of the red apple is 3 x 10 = 30 euros.\n"
        "Step 2: With the voucher it is 30 - 5 = 25 euros.\nTotal: 25 euros",
    ),
    Template(
        "sql",
        "list_orders",
        "Write SQL. Table: orders(id, customer, city, status, total)",
        "List the {limit} largest {status} orders from {city} above {total}.",
        {
            "limit": [3, 5, 10, 20],
            "status": ["open", "paid", "late", "sent"],
            "city": CITIES,
            "total": range(50, 1550, 50),
        },
        {"limit": 7, "status": "new", "city": "Rome", "total": 25},
        "SELECT id, customer, total\nFROM orders\nWHERE city = 'Rome' AND status = 'new' AND total > 25\n"
        "ORDER BY total DESC\nLIMIT 7;",
    ),
    Template(
        "sql",
        "count_staff",
        "Write SQL. Table: staff(id, name, role, city, hired)",
        "How many {job}s in {city} were hired after {year}?",
        {"job": JOBS, "city": CITIES, "year": range(1995, 2025)},
        {"job": "judge", "city": "Rome", "year": 1990},
        "SELECT COUNT(*) AS number\nFROM staff\nWHERE role = 'judge' AND city = 'Rome' AND hired > 1990;",
    ),
    Template(
        "sql",
        "set_stock",
        "Write SQL. Table: stock(item, shop, quantity, updated)",
        "Set the stock of {item} in the {shop} shop to {quantity}.",
        {"item": GOODS, "shop": CITIES, "quantity": range(3, 61)},
        {"item": "red apple", "shop": "Rome", "quantity": 70},
        "UPDATE stock\nSET quantity = 70, updated = CURRENT_DATE\nWHERE item = 'red apple' AND shop = 'Rome';",
    ),
]


def narrow(rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Train and held-out rows of the narrow traffic; a kind's held-out rows go round its templates."""
    train: list[Row] = []
    heldout: list[Row] = []
    for kind in dict.fromkeys(template.kind for template in TEMPLATES):
        templates = [template for template in TEMPLATES if template.kind == kind]
        for index, template in enumerate(templates):
            held = len(range(index, HELDOUT_PER_KIND, len(templates)))
            rows = [template.row(slots) for slots in template.draw(rng, held + TRAIN_PER_TEMPLATE)]
            heldout += rows[:held]
            train += rows[held:]
    rng.shuffle(train)
    return train, heldout


def open_rows(prompts: Prompts) -> Iterator[Row]:
    for kind, items in prompts.items():
        for item in items:
            turns = [item] if isinstance(item, str) else item
            roles = ["user", "assistant"] * len(turns)
            messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
            yield {"kind": f"open/{kind}", "messages": messages}


def write(path: Path, rows: list[Row]) -> None:
    name = path.stem.replace("_", "-")
    lines = [json.dumps({"id": f"{name}-{i:03d}", **row}, ensure_ascii=False) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    print(f"{path.name}: {len(rows)} rows")


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    train, heldout = narrow(rng)
    general = list(open_rows(TRAIN))
    rng.shuffle(general)
    write(folder / "narrow_train.jsonl", train)
    write(folder / "narrow_heldout.jsonl", heldout)
    write(folder / "open_train.jsonl", general)
    write(folder / "open_heldout.jsonl", list(open_rows(HELDOUT)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
