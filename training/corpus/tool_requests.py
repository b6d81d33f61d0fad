"""More ways to ask for the handwritten tools: patterns of `grammar` by tool, over the names of its parameters."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

_ASK = "[||||Please |Can you |Could you |I want you to |I'd like you to |Would you ]"
_SOON = "[||| today| tomorrow| tonight| this evening| this week| right now| on Sunday| at noon| next week]"
_WEATHER = (
    "[Will|Does] it [rain|snow|get warm|get cold|be sunny|be windy] in {c}" + _SOON + "?", "[Should|Must|Do] I [take|need|wear|pack|bring] [a coat|an umbrella|a jacket|boots|a hat|sunscreen|gloves|warm clothes] [in|for|to] {c}" + _SOON + "?", "[Is|Was] it [raining|snowing|sunny|warm|cold|windy|hot|dry] in {c}" + _SOON + "?",
    "[What|How] is the [weather|temperature|forecast|sky|climate] [like |][in|for|of] {c}" + _SOON + "?", "[I am|I'm] [going|flying|travelling] to {c}" + _SOON + "[. How is the weather there?|, will it rain?|. What should I wear?|, how warm is it there?]", "[Weather|Forecast|Temperature] [for|in|of] {c}" + _SOON + "[?|, please|.|]",
    _ASK + "[check|tell me|look up|find out|get] [the [weather|forecast|temperature]|how the weather is] [in|for] {c}" + _SOON + "[.|?]", "{c}: [weather|how is the weather|will it rain|forecast]" + "[?|]", "[How's|What's] the weather in {c}" + _SOON + "?",
)  # fmt: skip

REQUESTS: dict[str, tuple[str, ...]] = {
    "get_weather": tuple(p.replace("{c}", "{city}") for p in _WEATHER)
    + tuple(p.replace("{c}", "{location}") for p in _WEATHER),
    "get_time": (
        "[What's|What is] the [local |exact |current |]time in {city}[| now| at the moment]?",
        "[Which|What] hour is it in {city}[| now]?",
        _ASK + "[tell me|look up|check] [the time|what time it is] in {city}.",
        "Is it [late|early|night|morning] in {city}[| now]?",
        "{city}: what time is it?",
    ),
    "set_timer": (
        _ASK + "[set|start|make] a timer [for|of|over] {minutes} minutes.",
        "[Tell|Remind|Alert|Wake] me in {minutes} minutes.",
        "{minutes} minutes[, please|, starting now|. Go!| on the timer]",
        "[The eggs|My tea|The cake] [needs|need] {minutes} minutes, set a timer.",
        "[Timer|Countdown] of {minutes} minutes[, please|].",
    ),
    "send_message": (
        '[Let {to} know|Tell {to}|Write to {to}|Text {to}] [that|:] "{text}"[.|]',
        _ASK + "[send|text|write] {to} [the message|this message|a message|]: {text}",
        "[Message|Text] to {to}: {text}",
        '[Say|Write] "{text}" to {to}.',
    ),
    "search": (
        _ASK + "[search|look|google|browse] [the web |the internet |online |]for {query}",
        "[Find|Get] [me |]something about {query}",
        "[What does the web say|What do people write] about {query}?",
        "[Search|Web|Online]: {query}",
        "[Look|Check] online for {query}",
    ),
    "play_music": (
        _ASK + 'play [|me |the song |something called ]["{song}"|{song}]',
        '[I\'d like|I want|I need] to [hear|listen to] ["{song}"|{song}]',
        "[Music|Song]: {song}",
        "[Let's|Let us] [hear|listen to] {song}",
    ),
    "set_light": (
        _ASK + "[turn|switch] {on} the [light|lights|lamp] in the {room}.",
        "[The|Our] {room} [light|lamp] [should be|must be|please] {on}.",
        "{room}: light {on}",
        "Light {on} in the {room}[, please|].",
    ),
    "set_temperature": (
        _ASK + "[set|heat|warm|cool|bring] the {room} to {degrees}[ degrees|].",
        "[I want|I need|I'd like] {degrees} degrees in the {room}.",
        "The {room} [should be|must be] {degrees} degrees[| warm].",
    ),
    "book_flight": (
        _ASK
        + "[book|get|reserve|buy] [me |][a flight|a plane ticket|a seat] from {origin} to {destination} [on|for] {date}.",
        "[Flight|Fly] {origin} to {destination}, {date}[|, please]",
        "I [need|want|have] to [be in|get to] {destination} on {date}, flying from {origin}.",
    ),
    "book_hotel": (
        _ASK + "[book|find|reserve|get] [me |][a hotel|a room|a hotel room] in {city} for {nights} nights.",
        "[We|I] stay {nights} nights in {city}, [book|find|get] [us |me |]a hotel.",
        "{nights} nights in {city}[, please|, hotel]",
    ),
    "add_event": (
        _ASK + "[add|put|enter|write] {title} [to|in|into] [my|the] [calendar|diary] [on|for] {date}.",
        "{title} on {date} at {time}, [note it|put it in my calendar|add it].",
        "[Calendar|New entry]: {title} on {date} at {time}",
    ),
    "translate": (
        _ASK + 'translate "{text}" [to|into] {language}[, please|].',
        '[What is|What\'s] "{text}" in {language}?',
        '"{text}" in {language}[, please|?]',
    ),
    "create_note": (
        _ASK + '[note|save|write down|remember] [this: |the note |]"{text}".',
        '[Note|Memo]: "{text}"',
        '[Save|Note] "{text}" [under|with] [the tags|tags] {tags}.',
    ),
    "buy": (
        _ASK + "[buy|get|order|add] {items}[| for me| for dinner| at the shop].",
        "[We|I] [need|are out of|want] {items}[, put it on the list|, buy it|].",
    ),
    "delete_file": (
        _ASK + "[delete|remove|erase|throw away] [the file |]{path}[| forever| from the disk].",
        "[I don't|I do not|We no longer] need {path}[, delete it| any more. Remove it].",
    ),
    "get_order": (
        "[What happened to|When will I get|Is there news of|How far is] [my |]order {order_id}?",
        _ASK + "[check|look up|find|track] [my |the |]order [number |]{order_id}.",
        "My order number is {order_id}. [Where is it|What is its status|When does it come]?",
    ),
    "get_user": (
        _ASK + "[show|get|find|look up|fetch] [me |][the |]user [number |with the id |]{id}.",
        "Which user [has [the |]id|is number] {id}?",
    ),
    "call_phone": (
        _ASK + "[call|phone|ring|dial] {name}[| for me| now].",
        "[I need|I have|I want] to [speak|talk] [to|with] {name}[| on the phone], [call|ring] [them|now].",
        "[Start|Make] a [call|phone call] [to|with] {name}.",
    ),
    "convert": (
        _ASK + "[convert|change|turn] {amount} {from_unit} [to|into] {to_unit}.",
        "[How many|What is it in] {to_unit} [are|is|make|do I get for] {amount} {from_unit}?",
        "[What are|How much are|What is] {amount} {from_unit} in {to_unit}?",
        "{amount} {from_unit} in {to_unit}[?|, please]",
    ),
    "get_stock_price": (
        "[How much|What] [is|costs] [a share of|one share of|the stock of] {symbol}?",
        _ASK + "[check|get|look up|tell me] the [price|stock price|quote] [of|for] {symbol}.",
        "{symbol} [price|stock|quote][?|, please|]",
    ),
}
