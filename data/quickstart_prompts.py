"""Prompts of the quickstart job: short text-to-SQL and JSON-extraction requests.

The train and held-out prompts use disjoint schemas and record types. Everything here was written for this
project; the tables are compact text that `build` expands into chat messages.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = ("sql", "json")
SPLITS = ("train", "heldout")

# One schema per line (or two, the second indented): a table and, after " > ", its parent.
# Column roles: name* label, name=a/b category, name#1/2 additive number, name~1/2 other number,
# name@date date, name> foreign key, plain otherwise.
_SCHEMAS = {
    "train": """
books(id, title*, genre=history/poetry/travel, pages#150/300, date_added@2021-03-01/2023-06-15)
appointments(id, patient*, doctor=Dr. Okafor/Dr. Mehta, minutes#15/30/45, day@2024-02-01/2024-09-10)
harvests(id, field*, crop=barley/oats/potatoes, tonnes#5/12/20, pick_date@2022-08-01/2023-09-05)
rides(id, rider*, station=Harbor/Old Mill/University, minutes#20/30/60, start_date@2024-05-01/2024-07-20)
exhibits(id, name*, hall=East/North/Garden, age~100/500/1000, entry_date@1998-01-01/2015-04-30)
recipes(id, dish*, cuisine=Thai/Greek/Mexican, minutes~20/45/90, servings~2/4/6)
trails(id, name*, region=Alps/Lakes/Coast, length#5/10/18, climb#200/600/900)
pets(id, name*, species=cat/dog/rabbit, weight~3/8/20, last_visit@2023-11-01/2024-03-15)
trees(tag, street*, species=oak/linden/maple, height~6/18, plant_date@1975-01-01/2004-10-01)
cakes(id, name*, flavor=lemon/chocolate/carrot, price~12/25/40, units#5/20/50)
tool_rentals(id, customer*, tool=drill/ladder/sander, days#1/3/7, return_date@2024-01-15/2024-06-30)
donations(id, donor*, fund=shelter/school/clinic, amount#50/200/1000, gift_date@2022-12-01/2024-04-01)
catches(id, angler*, fish=trout/pike/perch, weight#1/2/5, lake=Mirror/Long/Silver)
rooms(number, floor~2/5/8, view=sea/garden/street, beds#1/2/4, rate~80/120/200)
parking_fines(id, plate*, street=King Road/Dock Lane, amount#30/60/90, issue_date@2023-02-01/2024-08-12)
songs(id, title*, artist=Blue Kites/Mara Voss/The Lanterns, seconds#180/240/300, plays#1000/50000)
swim_results(id, swimmer*, stroke=butterfly/freestyle, seconds~30/60, swim_date@2023-06-01/2024-06-01)
pickups(id, district=North/Center/Riverside, material=glass/paper, kg#100/400, day@2024-03-04/2024-10-21)
gym_members(id, name*, plan=basic/plus/student, visits#5/20/60, join_date@2020-01-01/2023-09-01)
solar_panels(id, roof*, maker=Helio/Sunora/Brightek, watts#300/400/450, install_date@2019-05-01/2022-07-01)
employees(id, name*, salary~40000/60000/85000, hire_date@2018-01-01/2021-09-15, department_id>) >
    departments(id, name*, city=Lyon/Leeds/Porto)
loans(id, borrower*, days#14/30/60, member_id>) > members(id, name*, level=adult/child/senior)
shipments(id, carrier=Swift/Norpak/Railgo, kg#50/200/800, warehouse_id>) >
    warehouses(id, name*, country=Spain/Poland/Chile)
tickets(id, buyer*, price~20/45/90, concert_id>) > concerts(id, band*, venue=Arena/Old Theater/Riverside Hall)
repairs(id, car*, cost#100/350/900, repair_date@2023-10-01/2024-05-05, mechanic_id>) >
    mechanics(id, name*, skill=brakes/engines/tires)
episodes(id, title*, minutes#15/40/75, podcast_id>) > podcasts(id, name*, topic=science/sports/cooking)
enrollments(id, student*, grade~50/70/90, course_id>) >
    courses(id, title*, teacher=Ms. Adeyemi/Mr. Novak/Ms. Silva)
seedlings(id, plant*, height~5/15/40, greenhouse_id>) > greenhouses(id, name*, climate=dry/humid/cool)
deliveries(id, address*, distance#3/10/25, driver_id>) > drivers(id, name*, vehicle=van/bike/truck)
goals(id, scorer*, minute~15/45/80, match_id>) >
    matches(id, opponent*, stadium=Westfield/Park End/City Ground)
""",
    "heldout": """
lighthouses(id, name*, coast=north/west/south, height~60/110/150, build_date@1850-01-01/1910-01-01)
beehives(id, keeper*, meadow=clover/heather/orchard, honey#8/15/30, check_date@2024-04-10/2024-08-01)
chess_games(id, white_player*, opening=Sicilian/French/Reti, moves#25/40/60, game_date@2022-05-01/2024-02-20)
coffee_roasts(batch, origin=Kenya/Peru/Sumatra, roast_level=light/medium/dark, grams#500/2000, score~80/86/90)
glaciers(id, name*, country=Norway/Nepal/Canada, area#10/80/300, thickness~50/120)
crossings(id, captain*, passengers#50/150/400, sail_date@2023-07-01/2024-01-10, ferry_id>) >
    ferries(id, name*, port=Stavik/Corran/Brodick)
auction_lots(lot_no, item*, final_bid#200/1500/9000, auction_id>) >
    auctions(id, house*, theme=clocks/maps/coins)
observations(id, star*, magnitude~4/9/14, observatory_id>) >
    observatories(id, site*, continent=Europe/Africa/Asia)
""",
}

# One question per line; "|" separates its wordings. t table, L label, C/c category and value, N/n/m number
# and values, S additive number, D/d/y date, value and year, k small count, a letter.
_QUESTIONS = """
How many {t} are there? | Count all {t}. | What is the number of rows in {t}?
How many {t} have {C} '{c}'? | Count the {t} whose {C} is {c}. | Number of {t} with {C} equal to {c}?
How many {t} have {N} above {n}? | Count {t} with more than {n} {N}. | Number of {t} where {N} exceeds {n}?
How many {t} have {N} of at most {n}? | Count {t} where {N} is {n} or less.
How many {t} have {D} after {d}? | Count the {t} with {D} since {d}. | Number of {t} with {D} later than {d}?
Show the {L} of {t} whose {C} is {c}. | List {L} for {t} with {C} '{c}'. | Which {L} have {C} {c}?
Show the {L} of {t} with {N} over {n}. | Which {t} have {N} greater than {n}? Give {L}. | {L} where {N} > {n}?
Show the {L} of {t} with {D} before {d}. | Which {L} have {D} earlier than {d}?
Find {t} with {C} {c} and {N} over {n}. | Show {t} with {C} '{c}' and with {N} above {n}.
Find {t} with {C} '{c}' or {N} below {n}. | {t} with {C} {c} or {N} under {n}?
Show the {k} {t} with the highest {N}. | Top {k} {t} by {N}. | Which {k} {t} have the largest {N}?
Show the {k} {t} with the lowest {N}. | List the {k} {t} with the smallest {N}. | Bottom {k} {t} by {N}.
Show the {k} most recent {t} by {D}. | Latest {k} {t} by {D}. | Which {k} {t} have the newest {D}?
Which of the {t} has the earliest {D}? | Show the oldest of the {t} by {D}. | Find the first {D} in {t}.
What is the average {N} of all {t}? | Compute the mean {N} in {t}. | Average {N} over all {t}?
What is the maximum {N} in {t}? | Find the highest {N} among {t}. | Give the largest {N} of any of the {t}.
What is the smallest and largest {N} in {t}? | Show the minimum and maximum {N} of {t}.
What is the total {S} of {t} with {C} {c}? | Sum the {S} where {C} is {c}. | Add up {S} for {C} '{c}'.
What is the average {N} of {t} with {C} {c}? | Mean {N} where {C} is {c}? | Average the {N} for {C} '{c}'.
How many {t} are there for each {C}? | Count {t} per {C}. | Number of {t} by {C}?
What is the average {N} for each {C}? | Show the mean {N} per {C}. | Average {N} grouped by {C}.
What is the total {S} for each {C}? | Show the sum of {S} per {C}. | Total {S} by {C}, largest first.
Which {C} has the most {t}? | Find the {C} with the most rows. | What is the most common {C} in {t}?
Which {C} values have more than {k} {t}? | List each {C} that has over {k} {t}.
List the different {C} values. | Which distinct {C} values occur? | How many different {C} values are there?
Show {t} with {N} between {n} and {m}. | Which {t} have {N} from {n} to {m}? | {t} where {N} is {n} to {m}?
Show {t} with {N} above the average {N}. | Which {t} have more than the average {N}?
Show {t} whose {L} starts with {a}. | Find every {L} beginning with letter {a}. | Which {L} start with {a}?
How many {t} have {D} in {y}? | Count {t} with {D} during {y}. | List {t} with {D} in the year {y}.
List {L} and {N} sorted by {N}. | Show {L} with {N}, highest first. | Show {L} and {N} ordered by {L}.
Which {t} have no {C}? | Find {t} where {C} is missing. | Count {t} with an empty {C}.
"""
# The same with a parent: P parent table, p one of its rows, M its label, G/g its category and value.
_JOINS = """
List all {t} with the {M} of their {p}. | Show each row of {t} with its {p} {M}.
How many {t} does each {p} have? Show {M}. | Count {t} per {p} {M}. | Number of {t} by {p} {M}?
Show {t} whose {p} has {G} {g}. | Which {t} belong to {P} with {G} '{g}'? | List {t} for {P} where {G} is {g}.
What is the average {N} per {p} {M}? | Show each {p} {M} with its mean {N}.
Which {P} have no {t}? | Find {P} without any {t}. | List the {M} of {P} that have no {t}.
Which {p} has the most {t}? | Find the {M} of the {p} with the most {t}.
Show {t} with {N} over {n} and their {p} {M}. | List the {p} {M} of {t} where {N} is above {n}.
How many {t} belong to {P} with {G} {g}? | Count {t} where the {p} {G} is '{g}'.
What is the highest {N} for each {p} {G}? | Show the maximum {N} per {p} {G}.
Which {P} have more than {k} {t}? | List the {M} of {P} with over {k} {t}.
"""
_SQL_WORDINGS = (
    "Given {s}, give the SQL for: {q} Only the query, nothing else.",
    "Using {s}, give one SELECT query: {q} Only the query, nothing else.",
    "-- {T} {s}\n-- {q}\nWrite only the SELECT statement.",
    "-- Given {s}\n-- {q}\nGive only the SQL query, nothing else.",
)

# "name | key: values; ..." starts a record type; the indented lines have its sentences. Values: a/b choices,
# #low-high[:step] integers, or the generators $person, $city, $date, $time.
_RECORDS = {
    "train": """
booking | guest: $person; hotel: Seaview Inn/Hotel Aurora/Maple Lodge; nights: #2-9; room: single/double/suite
  {guest} booked a {room} room at {hotel} for {nights} nights.
  {hotel} confirmed a {nights}-night stay in a {room} room for {guest}.
  A {room} room at {hotel} is held for {guest}, {nights} nights in all.
invoice | number: #1040-8990:7; client: Brightway/Orchard Foods/Kestrel; total: #120-4800:40; due: $date
  Invoice {number} to {client} for {total} euros is due on {due}.
  Please pay {total} euros by {due}: invoice {number}, issued to {client}.
  {client} owes {total} euros on invoice {number}, payable by {due}.
job_offer | role: nurse/welder/bus driver; company: Norline/Tidewell; city: $city; salary: #28000-92000:500
  {company} is hiring a {role} in {city} for {salary} a year.
  Wanted: {role} at {company}, {city}. Pay is {salary} per year.
  In {city}, {company} offers {salary} yearly to a {role}.
weather_report | city: $city; high: #14-38; low: #-6-12; sky: sunny/cloudy/foggy/rainy
  {city} will be {sky} today with a high of {high} and a low of {low}.
  Expect a {sky} day in {city}: {low} degrees at dawn, {high} by afternoon.
  Lows near {low} and highs near {high} are forecast for a {sky} {city}.
meeting | topic: budget/hiring plan/product launch/safety review; date: $date; time: $time; organizer: $person
  {organizer} set up a meeting about the {topic} on {date} at {time}.
  The {topic} meeting is at {time} on {date}, organized by {organizer}.
  On {date} at {time}, {organizer} will lead a talk on the {topic}.
product_review | product: kettle/desk lamp/backpack; stars: #1-5; buyer: $person; price: #15-140:5
  {buyer} gave the {product} {stars} stars and paid {price} dollars.
  For {price} dollars, {buyer} bought a {product} and rated it {stars} out of 5.
  Rated {stars} of 5 by {buyer}: a {product} costing {price} dollars.
flight | flight: NV214/QB77/LT306; origin: $city; gate: B4/A12/C7; departure: $time
  Flight {flight} from {origin} leaves at {departure} from gate {gate}.
  Passengers on {flight} out of {origin}: gate {gate}, departure {departure}.
  At {departure}, flight {flight} departs {origin} through gate {gate}.
lost_item | item: umbrella/wallet/scarf; color: red/black/green; place: bus 9/the gym; finder: $person
  {finder} found a {color} {item} at {place}. | A {color} {item} left at {place} was handed in by {finder}.
  Found at {place}: one {color} {item}. Ask {finder} for it.
apartment | city: $city; bedrooms: #1-5; rent: #600-2900:50; area_m2: #32-140:4
  For rent in {city}: {bedrooms} bedrooms, {area_m2} square meters, {rent} a month.
  This {area_m2} m2 flat in {city} has {bedrooms} bedrooms and costs {rent} monthly.
  Pay {rent} per month for {bedrooms} bedrooms and {area_m2} m2 in {city}.
car_ad | model: Corva 200/Lindon GT; year: #2006-2023; mileage: #12000-180000:1500; price: #2500-9500:250
  A {year} {model} with {mileage} km is for sale at {price}.
  Selling my {model}, built in {year}, {mileage} km driven, asking {price}.
  Price {price}: {model} from {year}, odometer at {mileage} km.
game_result | winner: Falcons/Pilots/Comets; loser: Otters/Miners/Rangers; score: 2-1/3-0/4-2; city: $city
  The {winner} beat the {loser} {score} in {city}.
  It ended {score} in {city} as the {loser} lost to the {winner}.
  In {city}, the {winner} won {score} against the {loser}.
prescription | patient: $person; drug: amoxicillin/ibuprofen/metformin; dose_mg: #50-500:50; days: #3-21
  {patient} takes {dose_mg} mg of {drug} daily for {days} days.
  Prescribed for {patient}: {drug}, {dose_mg} mg, {days} days.
  For the next {days} days, {patient} should take {drug} at {dose_mg} mg.
parcel | code: PX481/RT209/GM750; recipient: $person; city: $city; weight_kg: #1-28
  Parcel {code} for {recipient} in {city} weighs {weight_kg} kg.
  {recipient} of {city} will get parcel {code}, {weight_kg} kg, tomorrow.
  We sent {weight_kg} kg to {city} as {code}, addressed to {recipient}.
class_signup | student: $person; class: pottery/Italian/salsa; weekday: Monday/Saturday; fee: #20-180:5
  {student} joined the {class} class on {weekday} for {fee} dollars.
  The {weekday} {class} class costs {fee} dollars; {student} signed up.
  New sign-up: {student}, {class}, every {weekday}, fee {fee} dollars.
concert | band: Paper Foxes/Velvet Tram/Nina Sol; venue: Dome Hall/Pier Stage; date: $date; price: #15-95:5
  {band} play {venue} on {date}; tickets cost {price}.
  Tickets at {price} are on sale for {band} at {venue}, {date}.
  On {date} you can hear {band} at {venue} for {price}.
gift | donor: $person; amount: #25-2500:25; charity: Food Bank/River Trust/Book Aid; date: $date
  {donor} gave {amount} dollars to {charity} on {date}.
  {charity} received {amount} dollars from {donor} on {date}.
  On {date}, {charity} thanked {donor} for {amount} dollars.
repair_job | device: dryer/boiler; fault: a leak/a bad switch/rust; cost: #30-420:10; technician: $person
  {technician} fixed {fault} in the {device} for {cost} dollars.
  The {device} had {fault}; {technician} charged {cost} dollars.
  Repair bill of {cost} dollars from {technician}: {device} with {fault}.
race_result | runner: $person; race: City 10K/Forest Half/Hill Run; place: #1-60; minutes: #38-260
  {runner} finished number {place} in the {race} in {minutes} minutes.
  In the {race}, {runner} took place {place} after {minutes} minutes.
  After {minutes} minutes {runner} crossed the {race} line in position {place}.
contact | name: $person; phone: 555-0142/555-0187; city: $city; job: plumber/lawyer/tutor
  Call {name}, a {job} in {city}, at {phone}. | {name} works as a {job} in {city}; the number is {phone}.
  Need a {job} in {city}? Try {name}, {phone}.
grocery_order | product: apples/rice/lentils; quantity: #2-40; shop: GreenCart/Corner Mart; day: Monday/Friday
  Order {quantity} units of {product} from {shop} for {day}.
  {shop} will bring {quantity} units of {product} on {day}.
  On {day} we need {product}, {quantity} units, from {shop}.
""",
    "heldout": """
sighting | animal: lynx/osprey/moose; count: #1-14; habitat: marsh/forest/moor; observer: $person
  {observer} saw {count} of the {animal} kind near the {habitat}.
  Ranger {observer} logged {animal} in the {habitat}, number seen: {count}.
  Seen at the {habitat} by {observer}: {animal}, {count} in total.
ship_arrival | vessel: Astrid/Marisol; cargo: timber/grain/steel; tons: #300-9000:150; harbor: $city
  The {vessel} reached {harbor} with {tons} tons of {cargo}.
  {tons} tons of {cargo} came into {harbor} aboard the {vessel}.
  Docked in {harbor}: {vessel}, carrying {cargo}, {tons} tons.
patent | inventor: $person; invention: folding ladder/solar kiln/tide pump; filed: $date; claims: #4-38
  {inventor} filed a patent for a {invention} on {filed} with {claims} claims.
  The {invention} patent by {inventor}, filed {filed}, lists {claims} claims.
  Filed on {filed}: {invention}, {claims} claims, inventor {inventor}.
fossil_find | fossil: shark tooth/trilobite/fern; layer: chalk/shale; depth_m: #2-45; age_myr: #60-480:10
  A {fossil} about {age_myr} million years old lay {depth_m} m deep in {layer}.
  At {depth_m} m in the {layer} we dug up a {fossil}, {age_myr} million years old.
  The {layer} gave a {fossil} at {depth_m} m, dated to {age_myr} million years.
pet_adoption | pet: Biscuit/Juno/Pepper/Otto; breed: beagle/tabby/collie; age_years: #1-13; adopter: $person
  {adopter} adopted {pet}, a {breed} aged {age_years}.
  {pet} the {breed}, {age_years} years old, now lives with {adopter}.
  A {breed} named {pet}, age {age_years}, went home with {adopter}.
art_loan | artwork: Winter Quay/Two Sisters; lender: $person; museum: Civic Gallery/Tolle House; until: $date
  {lender} lent {artwork} to {museum} until {until}.
  {museum} shows {artwork}, on loan from {lender} until {until}.
  Until {until}, {artwork} from {lender} hangs in {museum}.
""",
}
_JSON_WORDINGS = (
    "{x}\nWrite only this JSON with its values filled in: {j}",
    "{x}\nGive only this JSON with its values filled in: {j}",
    "{x}\nReply with only this JSON, its values filled in: {j}",
    "Sentence: {x}\nWrite only this JSON with its values filled in: {j}",
)

_POOLS = {
    "train": """
Maria Tomas Aisha Erik Lucia Kenji Priya Samuel Ines Omar Greta Daniel Yara Felix Chloe Mateo Oskar Wanda Jamal \
Ebba Silvia Pavel Noor Hugo Amara Dmitri Elena Gavin Rosa Tariq \
Ulla Winston Beatriz Cedric Fatima Henrik Joanna Kofi Linnea Marek
Lopez Berg Khan Rossi Tanaka Dubois Patel Moreau Costa Haddad Weber Nowak Reyes Ford Osei Lind Abbott Bianchi Chavez \
Dahl Eriksen Fontaine Garrido Hoffman Ito Jansen Kowalski Larsson Mbeki Novotny Oduya Petrov Quinn Romero Schwartz Tran
Denver Lisbon Kyoto Lagos Bergen Quito Dublin Hanoi Austin Genoa Tunis Leipzig Antwerp Bogota Cardiff Dakar Edinburgh \
Fresno Geneva Helsinki Izmir Jaipur Krakow Lima Malmo Nairobi Osaka Perth Rabat Seville Tampere Utrecht Vienna Zagreb
January March April June July September October December
""",
    "heldout": """
Hanna Victor Leila Bruno Sofie Rajan Alba Callum
Ekholm Castro Amari Pryce Zeller Ibarra Donnelly Sato
Halifax Gdansk Valencia Mombasa Hobart Riga
February May August November
""",
}  # first names, surnames, cities and months
_DRAWS_PER_RECORD = 60

# Words that take the place of table, column and key names in training prompts, so that a draft learns to copy
# the names in front of it instead of learning thirty schemas by heart.
_NOUNS = """
anchor apron arrow atlas attic badge bakery bamboo banner barrel basin basket beacon beaker beam bench bishop
blade blanket blossom bolt bottle branch brass bread brick bridge bronze broom bucket buckle bundle butter
button cabin cable camera canal candle canvas canyon captain caravan cargo carpet castle cedar cellar chain
chamber chapel charcoal cherry chimney circus clay cliff clinic clock clover coach cobalt coffee collar column
comet compass copper coral corridor cotton cradle crater cricket crown crystal curtain cushion dagger dairy
desert diary dome dragon drum easel echo ember engine factory falcon feather fence ferry fiddle flag flask
fleet flute forge fountain furnace galaxy garlic garment gear ginger glove goblet granite gravel guitar hammer
hammock harness hatch hazel helmet herald hinge honor hotel igloo indigo ink island ivory jacket jasmine jewel
journal jungle kettle kitchen kite label ladder lagoon lantern laurel leather ledger lemon lever lily linen
locket lotus magnet mango manor marble market mask meadow medal melon mirror monument mortar moss motor mural
needle nest nickel notebook oasis oboe orchard orchid oven oyster paddle palace panther parcel parlor pebble
pepper piano pillow pilot pine planet plaza plow pocket pollen portrait powder prairie prism puddle pulley
puppet pyramid quarry quartz quilt rabbit raft ranch raven reef relay ribbon ridge rifle rocket saddle saffron
sail salad scarf scroll shelf shield signal silk silver sketch slate sleeve spark spider spindle sponge stable
statue stove straw stream studio sugar summit sword tablet tailor tavern temple thimble thunder timber tobacco
torch tower trellis trophy trumpet tulip tunnel turbine turtle valley vault velvet vineyard violin wagon
walnut waterfall whistle willow window winter wizard wool
"""
_KEPT_NAMES = {"name", "date", "time", "title", "for", "the", "and", "with", "from"}
_SHARE_RENAMED = 0.75


@dataclass
class _Table:
    """One parsed table: its text and its columns by role, with each column's constants."""

    name: str
    text: str
    roles: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _singular(name: str) -> str:
    return name[:-3] + "y" if name.endswith("ies") else name[:-2] if name.endswith("ches") else name[:-1]


def _parse_table(line: str) -> _Table:
    name, _, inner = line.rstrip(")").partition("(")
    table, columns = _Table(name, ""), []
    for spec in inner.split(", "):
        at = next((i for i, char in enumerate(spec) if char in "*=#~@>"), len(spec))
        columns.append(spec[:at])
        role, values = spec[at : at + 1], spec[at + 1 :].split("/")
        table.roles.setdefault(role, []).append((spec[:at], values))
        if role in ("#", "~"):
            table.roles.setdefault("number", []).append((spec[:at], values))
    table.text = f"{name}({', '.join(columns)})"
    return table


def _schemas(split: str) -> list[list[_Table]]:
    """The schemas of a split, each a table and possibly its parent."""
    lines = _SCHEMAS[split].strip().replace(" >\n    ", " > ").splitlines()
    return [[_parse_table(table) for table in line.split(" > ")] for line in lines]


def _records(split: str) -> list[tuple[str, dict[str, str], list[str]]]:
    """The record types of a split: name, values by key, and sentences."""
    records: list[tuple[str, dict[str, str], list[str]]] = []
    for line in _RECORDS[split].strip().splitlines():
        if line.startswith("  "):
            records[-1][2].extend(line.strip().split(" | "))
        else:
            name, _, keys = line.partition(" | ")
            records.append((name, dict(key.split(": ", 1) for key in keys.split("; ")), []))
    return records


def _options(table: _Table, role: str, column: str, value: str, used: set[str]) -> list[dict[str, str]]:
    """The ways to fill a column placeholder and its value placeholder, one empty way if they are not used."""
    if not used & {column, value}:
        return [{}]
    options: list[dict[str, str]] = []
    for name, values in table.roles.get(role, []):
        if column == "N" and "m" in used:
            options.append({"N": _words(name), "n": values[0], "m": values[-1]})
        elif value in used or (column == "D" and "y" in used):
            options += [{column: _words(name), value: v, "y": v[:4]} for v in values]
        else:
            options.append({column: _words(name)})
    return options


def _questions(schema: list[_Table], lines: str, rng: random.Random) -> Iterator[list[str]]:
    """For each question template that fits the schema, its questions in random order."""
    child, parent = schema[0], schema[-1]
    for line in lines.strip().splitlines():
        wordings = line.split(" | ")
        used = {name for _, name, _, _ in string.Formatter().parse(line) if name}
        slots = (
            (child, "*", "L", ""),
            (child, "=", "C", "c"),
            (child, "number", "N", "n"),
            (child, "#", "S", ""),
            (child, "@", "D", "d"),
            (parent, "*", "M", ""),
            (parent, "=", "G", "g"),
        )
        questions = []
        for parts in itertools.product(*(_options(*slot, used) for slot in slots)):
            values = {"t": _words(child.name), "P": _words(parent.name), "p": _words(_singular(parent.name))}
            values |= {"k": str(rng.randint(2, 9)), "a": rng.choice("ABCDHKLMPRST")}
            for part in parts:
                values |= part
            questions.append(rng.choice(wordings).format(**values))
        rng.shuffle(questions)
        yield questions


def _interleave(groups: list[list[str]], rng: random.Random) -> list[str]:
    """Take one item of each group in turn, the groups in random order in each turn."""
    out: list[str] = []
    for turn in itertools.zip_longest(*groups):
        items = [item for item in turn if item is not None]
        rng.shuffle(items)
        out += items
    return out


def _sql_prompts(split: str, rng: random.Random) -> list[str]:
    groups = []
    for schema in _schemas(split):
        questions = _interleave(list(_questions(schema, _QUESTIONS, rng)), rng)
        if len(schema) > 1:  # half of the questions on two tables join them
            joins = _interleave(list(_questions(schema, _JOINS, rng)), rng)
            questions = [q for pair in itertools.zip_longest(joins, questions) for q in pair if q]
        text, word = ", ".join(table.text for table in schema), "Table" if len(schema) == 1 else "Tables"
        prompts = []
        for question in dict.fromkeys(questions):
            prompts.append(rng.choice(_SQL_WORDINGS).format(T=word, s=text, q=question))
        groups.append(prompts)
    return _interleave(groups, rng)


def _draw(spec: str, split: str, rng: random.Random) -> str:
    """One value of a record key."""
    first_names, surnames, cities, months = (line.split() for line in _POOLS[split].strip().splitlines())
    if spec.startswith("#"):
        bounds, _, step = spec[1:].partition(":")
        low, _, high = bounds.rpartition("-")
        return str(rng.randrange(int(low), int(high) + 1, int(step or 1)))
    if spec == "$person":
        return f"{rng.choice(first_names)} {rng.choice(surnames)}"
    if spec == "$city":
        return rng.choice(cities)
    if spec == "$date":
        return f"{rng.randint(1, 28)} {rng.choice(months)} {rng.randint(2021, 2025)}"
    if spec == "$time":
        return f"{rng.randint(7, 20)}:{rng.choice(('00', '15', '30', '45'))}"
    return rng.choice(spec.split("/"))


def _json_prompts(split: str, rng: random.Random) -> list[str]:
    groups = []
    for _, specs, sentences in _records(split):
        prompts: dict[str, None] = {}
        for number in range(_DRAWS_PER_RECORD):
            facts = {key: _draw(spec, split, rng) for key, spec in specs.items()}
            text, keys = sentences[number % len(sentences)].format(**facts), list(specs)
            if rng.random() < 0.3:  # ask for some of the facts only
                keys.remove(rng.choice(keys))
            skeleton = "{" + ", ".join(f'"{key}": ""' for key in keys) + "}"
            prompts[rng.choice(_JSON_WORDINGS).format(j=skeleton, x=text)] = None
        groups.append(list(prompts))
    return _interleave(groups, rng)


def _rename(content: str, rng: random.Random) -> str:
    """Replace most words of the names in a prompt, each by the same noun wherever it occurs."""
    heldout = " ".join([_SCHEMAS["heldout"], _RECORDS["heldout"]])
    nouns = [n for n in _NOUNS.split() if n not in heldout]
    names = re.findall(r"([a-z_]+)\(([^)]*)\)", content)
    words = [w for table, columns in names for w in re.findall("[a-z]{3,}", f"{table} {columns}")]
    words += [w for key in re.findall(r'"([a-z_]+)": ""', content) for w in re.findall("[a-z]{3,}", key)]
    picks: dict[str, str] = {}
    for word in dict.fromkeys(w.removesuffix("s") for w in words):
        if word not in _KEPT_NAMES and rng.random() < _SHARE_RENAMED:
            picks[word] = nouns.pop(rng.randrange(len(nouns)))
    if not picks:
        return content
    pattern = re.compile(r"(?<![A-Za-z])(" + "|".join(sorted(picks, key=len, reverse=True)) + r")(s?)(?![A-Za-z])")
    return pattern.sub(lambda m: picks[m[1]] + m[2], content)


def _pools(split: str, seed: int) -> dict[str, list[str]]:
    rng = random.Random(f"{split}-{seed}")
    return {"sql": _sql_prompts(split, rng), "json": _json_prompts(split, rng)}


def available(split: str, seed: int = 0) -> int:
    """How many prompts `build` can make."""
    return 2 * min(len(pool) for pool in _pools(split, seed).values())


def build(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` distinct prompts of a split, kinds alternating; any prefix is spread over all schemas."""
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'heldout', not {split!r}")
    pools = _pools(split, seed)
    most = 2 * min(len(pool) for pool in pools.values())
    if not 0 <= count <= most:
        raise ValueError(f"count must be 0 to {most} for split {split!r}, not {count}")
    rows: list[dict[str, Any]] = []
    for index in range(count):
        kind = KINDS[index % 2]
        content = pools[kind][index // 2]
        if split == "train":
            content = _rename(content, random.Random(f"rename-{seed}-{index}"))
        row_id = f"{kind}-{split}-{index // 2 + 1:04d}"
        rows.append({"id": row_id, "kind": kind, "messages": [{"role": "user", "content": content}]})
    return rows
