"""Raw material of the generator: English words, names, places, pseudo-words, codes.

Payloads (what the model copies, spells or looks up) are drawn over all of these and over the
tokenizer's own pieces, so that no token is seen only in template text.
"""

# ruff: noqa: SIM905  (word lists read best so)
import random
import string

ENGLISH = (
    "able about above accept account across act action active actor add address adult advice afraid after "
    "again age agent ago agree air airport alarm album alive all allow almost alone along already also "
    "always amazing among amount anchor ancient angle angry animal answer ant any apart apple april area "
    "arm army around arrive arrow art article ask asleep attack aunt autumn average avoid awake away baby "
    "back bacon bad bag bake balance ball balloon banana band bank bar base basket bath battle beach bean "
    "bear beard beautiful because become bed bee beef before begin behind believe bell belong below belt "
    "bench best better between beyond bicycle big bird birth biscuit bite bitter black blade blanket blind "
    "block blood blow blue board boat body boil bold bone book boot border boring born borrow boss both "
    "bottle bottom bowl box boy brain branch brave bread break breakfast breath brick bridge brief bright "
    "bring broken brother brown brush bucket budget build bundle burn bus bush business busy butter button "
    "buy cabin cable cake call calm camel camera camp can canal candle candy cap captain car card care "
    "carpet carrot carry castle cat catch cause cave ceiling cell center chain chair chalk chance change "
    "chapter charge chase cheap check cheese cherry chest chicken chief child choice choose church circle "
    "city clay clean clear clever climb clock close cloth cloud club coach coal coast coat coffee coin cold "
    "collar collect college color come comfort common company complete computer concert cook cool copper "
    "copy coral corner correct cost cotton couch could count country couple course cover cow crack craft "
    "crazy cream create crew crime crisp crop cross crowd crown cruel cry cup curious current curtain curve "
    "custom cut cycle daily damage dance danger dark data date daughter dawn day dead deal dear death "
    "debate decide deep deer defend degree delay deliver demand dentist depend desert design desk detail "
    "develop dial diamond diet different dig dinner direct dirt discover dish distance divide doctor dog "
    "dollar dolphin donkey door double doubt down dragon draw dream dress drink drive drop drum dry duck "
    "dull during dust duty each eager eagle ear early earn earth easy eat echo edge effect effort egg eight "
    "either elbow elder electric elephant else empty end enemy energy engine enjoy enough enter equal error "
    "escape even evening event ever every evil exact example except excite excuse exist exit expect explain "
    "express extra eye fabric face fact factory fail fair faith fall false family famous fancy far farm "
    "fast fat father fault favor fear feast feather fee feed feel fence festival fever few field fight "
    "figure file fill film final find fine finger finish fire firm first fish fit five fix flag flame flat "
    "flavor float floor flour flower fly focus fog fold follow food foot force forest forget fork form "
    "fortune forward four fox frame free freeze fresh friend frog from front frost fruit fuel full fun "
    "funny fur future gain gallery game garage garden garlic gas gate gather gentle ghost giant gift ginger "
    "girl give glad glass globe glove glue go goal goat gold good goose grab grade grain grand grape grass "
    "gravity gray great green grid ground group grow guard guess guest guide guitar gum habit hair half "
    "hall hammer hand handle happen happy harbor hard harvest hat hate have hawk head health hear heart "
    "heat heavy height hello help hen her here hero hidden high hill him hip history hit hold hole holiday "
    "hollow home honest honey hood hope horn horse hospital host hot hotel hour house how huge human humble "
    "humor hundred hungry hunt hurry hurt husband ice idea image impact important inch include income "
    "increase indeed index indoor industry inner insect inside into invite iron island item ivory jacket "
    "jaguar jam jar jazz jealous jeans jelly jewel job join joke journey joy judge juice jump jungle junior "
    "just keen keep kettle key kick kid kind king kiss kitchen kite kitten knee knife knock know label "
    "labor lack ladder lady lake lamp land language lantern large last late laugh law layer lazy lead leaf "
    "learn leather leave left leg legal lemon lend lens lesson letter level library lid lie life lift light "
    "like limb limit line lion lip liquid list listen little live liver lizard load loan local lock logic "
    "lonely long look loose lose loud love low loyal luck lucky lunch machine magic magnet mail main major "
    "make male man manage mango many map maple marble march mark market marry mask mass master match "
    "material matter maybe meadow meal mean measure meat medal medicine meet melon melt member memory "
    "mention menu mercy message metal middle might mild milk mill mind minute mirror miss mist mix mobile "
    "model modern moment monday money monkey month mood moon more morning mother motion motor mountain "
    "mouse mouth move movie much mud museum mushroom music must mystery nail name narrow nation nature near "
    "neat neck need needle neighbor neither nerve nest net never new news next nice night nine noble noise "
    "none noodle noon normal north nose note nothing notice novel november now number nurse nut oak object "
    "ocean october odd off offer office often oil old olive once one onion only open opera opinion orange "
    "orbit order organ other otter outside oven over owl own owner oxygen oyster pack paddle page pain "
    "paint pair palace palm pan panda panel panic paper parade parent park parrot part party pass past "
    "pasta paste path patient pattern pause pay peace peach peanut pear pearl pen pencil penguin people "
    "pepper perfect perhaps period person phone photo phrase piano pick picnic picture piece pig pigeon "
    "pillow pilot pin pine pink pipe pirate pizza place plain plan planet plant plastic plate play please "
    "plenty plum pocket poem poet point poison polar police polite pond pool poor popular port position "
    "possible post pot potato pottery powder power practice pray present press pretty price pride prince "
    "print prison private prize problem produce profit program project promise proof proper protect proud "
    "prove public pull pulse pumpkin punch pupil puppy pure purple purpose push put puzzle quality quarter "
    "queen question quick quiet quilt quite rabbit race radio rail rain raise random range rapid rare raven "
    "raw reach read ready real reason recipe record red refuse region regular relax remain remember remote "
    "remove rent repair repeat reply report rescue rest result return reward rhythm rice rich ride right "
    "ring ripe rise risk river road roast robot rock rocket roll roof room root rope rose rough round route "
    "royal rubber rude rule run rush sad saddle safe sail salad salmon salt same sand sauce save say scale "
    "scarf school science score scout screen sea search season seat second secret see seed seem sell send "
    "senior sense sentence series serve settle seven shade shadow shake shape share shark sharp she sheep "
    "sheet shelf shell shift shine ship shirt shoe shop shore short should shoulder shout show shower shut "
    "shy sick side sign signal silent silk silly silver similar simple since sing sister sit six size skill "
    "skin skirt sky sleep sleeve slice slide slim slow small smart smell smile smoke smooth snack snail "
    "snake snow soap social sock soft soil soldier solid solve some son song soon sorry sort soul sound "
    "soup source south space spare speak special speed spell spend spice spider spirit split spoon sport "
    "spot spring square squirrel stable stage stair stamp stand star start state station stay steal steam "
    "steel step stick still stone stop store storm story stove straight strange straw stream street string "
    "strong student study style subject sudden sugar suggest suit summer sun sunday supper supply sure "
    "surface surprise swan sweet swim swing switch sword symbol system table tail take tale talent talk "
    "tall tank tape target task taste taxi tea teach team tear tell temple ten tender tennis tent terminal "
    "test text thank that theory there thick thief thin thing think this thought thousand thread three "
    "throat throne through throw thumb thunder ticket tide tie tiger tight time tin tiny tired title toast "
    "today toe together tomato tomorrow tongue tonight tool tooth topic torch total touch tough tour toward "
    "towel tower town toy track trade traffic train travel treasure tree triangle trick trip trophy trouble "
    "truck true trumpet trust truth try tuesday tulip tunnel turkey turn turtle twelve twin two type ugly "
    "umbrella uncle under unicorn union unique unit until upper upset urban use useful usual valley value "
    "van vanilla vase vast vegetable velvet very vessel victory video view village violet violin visit "
    "vital voice volcano volume vote voyage wagon waist wait wake walk wall wallet walnut want war warm "
    "warn wash waste watch water wave wax way weak wealth wear weather web wedding week weight welcome well "
    "west wet whale what wheat wheel when where whisper whistle white who whole why wide wife wild will "
    "wind window wine wing winner winter wire wise wish witness wolf woman wonder wood wool word work world "
    "worry worth would wrap wrist write wrong yard year yellow yes yesterday yogurt you young zebra zero "
    "zone zoo"
).split()

NAMES = (
    "Ada Adam Aisha Alan Alba Alex Alice Amir Amy Ana Anders Anna Anton Arjun Astrid Ben Bella Bianca Bob "
    "Boris Bruno Carla Carlos Carol Cem Chen Chloe Clara Dan Daniel Dana David Diego Dina Dora Elena Eli "
    "Ella Emil Emma Eric Esra Eva Farid Felix Fiona Frank Freya Gina Grace Greta Hana Hans Harry Hugo Ian "
    "Ida Ines Ingrid Isaac Ivan Iris Jack James Jana Jonas Julia Kai Karim Kate Kenji Kim Lars Laura Lea "
    "Leo Liam Lily Lina Lucas Lucy Maja Marco Maria Marta Max Maya Mei Mia Mina Mohamed Nadia Nina Noah "
    "Nora Olga Oliver Omar Oscar Otto Pablo Paul Petra Priya Rachel Rana Ravi Rita Robert Rosa Sam Sara "
    "Sven Sofia Tara Theo Tim Tom Uma Vera Victor Wei Yara Yuki Yusuf Zara Zoe Zora"
).split()

CITIES = (
    "Accra Amsterdam Ankara Athens Bangkok Barcelona Beijing Belfast Bergen Berlin Bern Bogota Boston "
    "Brussels Bucharest Budapest Cairo Chicago Copenhagen Dakar Delhi Denver Dublin Dubai Edinburgh "
    "Florence Geneva Genoa Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyoto Lagos Leeds Lima "
    "Lisbon Liverpool London Lyon Madrid Malaga Manila Melbourne Miami Milan Montreal Moscow Munich Nairobi "
    "Naples Nice Oslo Osaka Ottawa Oxford Paris Perth Porto Prague Quito Reykjavik Riga Rome Rotterdam "
    "Santiago Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Tallinn Tokyo Toronto Tunis "
    "Turin Venice Vienna Vilnius Warsaw Zagreb Zurich"
).split()

COLOURS = ("red blue green yellow orange purple pink brown black white grey silver gold teal violet").split()
FOODS = (
    "pizza pasta rice bread soup salad cheese apples sushi curry tacos noodles pancakes chocolate fish eggs "
    "mangoes olives beans toast cake honey cherries potatoes"
).split()
ANIMALS = (
    "cat dog horse rabbit parrot turtle fox owl tiger lion penguin dolphin goat sheep wolf bear whale otter "
    "panda zebra frog eagle snake duck cow hamster"
).split()
JOBS = (
    "doctor teacher nurse baker pilot farmer lawyer writer painter engineer plumber chef driver singer "
    "judge dentist sailor builder gardener barber"
).split()
THINGS = (
    "key book lamp phone wallet map hat bag ring cup bottle box camera umbrella knife ticket coat letter "
    "ladder bike guitar clock pen chair basket drum coin watch laptop towel"
).split()
PLACES = (
    "kitchen garden garage office attic cellar bedroom hallway library car drawer kitchen shed bathroom "
    "cupboard fridge lobby basement closet barn"
).split()
MONTHS = ("January February March April May June July August September October November December").split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr kl pl pr sh sk st th tr qu y x".split()
_VOWELS = "a e i o u ai ea oo y ou ie".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "x", "nd", "rk", "sh", "ck", "p", "d"]

_pieces: list[str] = []


def use_pieces(pieces: list[str]) -> None:
    """Let `piece_word` draw from these tokenizer pieces (letters only), set once after BPE training."""
    _pieces[:] = pieces


def pseudo_word(rng: random.Random, most: int = 3) -> str:
    """A pronounceable word of 1 to `most` syllables that is (nearly always) no English word."""
    count = rng.randint(1, most)
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)
    return word if len(word) > 2 else word + rng.choice("nrlst")


def piece_word(rng: random.Random) -> str:
    """One or two tokenizer pieces glued together; a pseudo-word before the tokenizer exists."""
    if not _pieces:
        return pseudo_word(rng)
    return "".join(rng.choice(_pieces) for _ in range(rng.choice((1, 1, 2))))


def english(rng: random.Random) -> str:
    """A common English word, now and then inflected."""
    word = rng.choice(ENGLISH)
    chance = rng.random()
    if chance < 0.06 and word[-1] not in "sy":
        return word + "s"
    if chance < 0.10 and word[-1] not in "ey":
        return word + "ing"
    return word


def any_word(rng: random.Random) -> str:
    """A word of any origin, mostly lower case."""
    chance = rng.random()
    if chance < 0.5:
        word = english(rng)
    elif chance < 0.72:
        word = pseudo_word(rng)
    elif chance < 0.92:
        word = piece_word(rng)
    else:
        return rng.choice((rng.choice(NAMES), rng.choice(CITIES)))
    return word.capitalize() if rng.random() < 0.12 else word


def name(rng: random.Random) -> str:
    """A person's name: common, or invented."""
    chance = rng.random()
    if chance < 0.5:
        return rng.choice(NAMES)
    return (english(rng) if chance < 0.6 else pseudo_word(rng)).capitalize()


def place(rng: random.Random) -> str:
    """A city: real, or invented."""
    chance = rng.random()
    if chance < 0.55:
        return rng.choice(CITIES)
    if chance < 0.6:
        return f"{rng.choice(('New', 'San', 'Port', 'North', 'Old'))} {pseudo_word(rng, 2).capitalize()}"
    return (english(rng) if chance < 0.65 else pseudo_word(rng)).capitalize()


def code(rng: random.Random) -> str:
    """A short opaque string: digits, letters and digits, or a word with digits."""
    kind = rng.randrange(5)
    if kind == 0:
        return "".join(rng.choice(string.digits) for _ in range(rng.randint(2, 7)))
    if kind == 1:
        return "".join(rng.choice(string.ascii_uppercase + string.digits) for _ in range(rng.randint(3, 7)))
    if kind == 2:
        return any_word(rng) + str(rng.randint(0, 999))
    if kind == 3:
        left = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(1, 3)))
        return f"{left}-{rng.randint(1, 9999)}"
    return f"{any_word(rng)}-{any_word(rng)}"


def value(rng: random.Random) -> str:
    """A word, code or number to be looked up."""
    chance = rng.random()
    if chance < 0.45:
        return any_word(rng)
    return code(rng) if chance < 0.8 else str(rng.randint(0, 2000))


def sentence(rng: random.Random, least: int = 3, most: int = 9) -> str:
    """A sentence-like run of words with a capital and a full stop; means nothing."""
    words = [
        any_word(rng) if rng.random() < 0.8 else rng.choice(GLUE) for _ in range(rng.randint(least, most))
    ]
    words[0] = words[0][:1].upper() + words[0][1:]
    return " ".join(words) + "."


GLUE = ("the a of to in is and for it on with as at by an or not be are was from that this has").split()
