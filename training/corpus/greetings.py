"""Patterns of what people say for an intent of small talk (`small_talk.INTENTS` has the replies)."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

_HI = "[Hi|Hello|Hey|Hey there|Hi there|Hello there|Hiya|Howdy|Heya|Oh hi|Greetings|Good day]"
_YOU = "[|||, Argosy| bot| friend| my friend| again| everyone| buddy| little model|, you| dear model]"
_FEEL = "[so|very|really|a bit|rather|quite|pretty||]"
_WHEN = "[||| today| right now| this morning| lately| tonight| these days]"
_BYE = "[bye|goodbye|see you|see you later|talk to you later|later|until then|catch you soon|see you soon|so long|bye for now|bye bye|take care|farewell]"
_TY = "[thanks|thank you|many thanks|cheers|thx|ty|thank you very much|thanks a lot|thanks a million|thank you so much|thanks so much|thank you kindly]"
_FOR = "[||| mate| friend| bot| Argosy| again| for that| for your help| for the answer| for helping me| for everything| for your time| buddy]"
_GOOD = "[good|great|smart|clever|nice|cool|amazing|impressive|awesome|brilliant|fantastic|wonderful|funny|sweet|fast]"

PATTERNS: dict[str, tuple[str, ...]] = {
    "hello": (
        _HI + _YOU + "[!|.|,|] [Nice|Good|Great|Lovely|Pleased|Glad] to [see|meet|have|find|talk to] you[| again| here| today][!|.|| :)]",
        _HI + _YOU + "[!|.||, | :)]",
        _HI + _YOU + "[,|!|.] [let's chat|can we talk|can we chat|are you there|I have a question|I need something|I am new here|I'm back|it's me again|what's new|shall we start][?|.|!|]",
        "[Is anybody|Anybody|Anyone|Is anyone|Is somebody|Somebody] [there|here|at home|listening|around|in]?",
        "[I'm|I am] [back|here|new here|online][.|!]", "It[ is|'s] [nice|good|great] to [see|meet] you[| again|, friend].",
        "[Just|I only wanted to be] saying [hi|hello][!|.]", "[I want|I wanted|I just want] to say [hi|hello].",
    ),
    "morning": ("[|Hey|Hi|Hello|Oh|Ah|And a][,|] [very|] good morning[| to you| there| friend| everyone| to all|, my friend][!|.||, how nice]", "[Good morning|Morning][!|,] [did you wake up|time to work|the sun is up|let's start|are you awake|coffee first|it's early][?|!|.]"),
    "evening": ("[|Hey|Hi|Hello|Oh|And a][,|] [very|] good evening[| to you| there| friend| everyone|, my friend][!|.|]", "Good [evening|evening to you][!|,] [it got dark|what a day|the day is over|still there|are you still up][?|!|.]"),
    "night": (
        "[Good night|Goodnight|Night night|Nighty night|Sweet dreams|Sleep well|Sleep tight][| everyone| friend| Argosy| to you| and sweet dreams][!|.|]",
        "[I'm|I am|Now I am] [going|off|heading] to [bed|sleep][| now| early| soon][,|.] [good night|sleep well|night|night night][!|.|]",
        "[It is|It's] [late|dark|past midnight|time for bed|bedtime][,|.] [|so ][good night|sleep well|I go to bed|I will sleep now|I need to sleep][!|.|]",
    ),
    "how": (
        "[|||" + _HI + _YOU + "[,|!|.] ]how [are|are] you[| doing| feeling| getting on| keeping][| today| now| this morning| tonight| these days| so far| lately| at the moment]?",
        "[|||" + _HI + _YOU + "[,|!|.] ][how's|how is|how was] [your|the|this] [day|morning|evening|weekend|life|work|afternoon|year][| going| been| treating you| so far| going for you]?",
        "[|||" + _HI + _YOU + "[,|!|.] ]how [are things|is everything|is it going|goes it|have things been|is life|is it][| over there| for you| going][| today| lately| these days]?",
        "[|Good morning! |Good evening! |Hi! ][Are you|Is everything|Is all] [well|fine|ok|okay|good|alright][| today| over there| there]?",
        "[|Hi, |Hey, ]did you [sleep|rest] well?", "[|Hi, |Hey, ]you [ok|okay|alright|good][| there| today]?", "[I hope|Hope] you are [well|fine|doing well|okay].",
    ),
    "who": (
        "[And|So|Now|Sorry,|Excuse me,|Hey,|] [who|what] [are you|is this|is speaking|is there|are you exactly|are you really]?",
        "[May|Can|Could] I [know|ask|hear] [who you are|what you are|your name|what you are called]?",
        "[Who|What|Which model|Which bot|Which AI] [am I|have I been] [talking|speaking|writing] [to|with][| here| now|, please|, exactly]?",
        "Are you [really|just|actually|maybe|] a [bot|machine|computer|person|human|language model|program|model|chatbot|real human|assistant|small model][| or not| or a human|, or what]?",
        "Are you an [AI|assistant|artificial intelligence|LLM|intelligent machine][| or not| or a human|, or what]?",
        "[Tell|Say|Write] me [a bit|something|more|a little|] about [you|yourself][|, please].",
        "[Which|What] [model|version|AI|bot|language model|kind of AI|system|kind of machine] [are you|is this|do I talk to]?",
        "[Who|Which company|Which team|Which people] [made|built|trained|created|programmed|developed|runs] you?",
        "[What's|What is|Say|Tell me|And|Please tell me] your [name|full name|real name][?|.|]",
        "[Introduce|Describe|Present|Explain] yourself[|, please| to me| briefly| in one sentence| shortly].",
        "[Do|Did] [you have|they give you|anyone give you] a name?",
    ),
    "can": (
        "[What|Which things] [can|could] you [do|do for me|do here|answer|do all day|do best|show me]?",
        "[What|Which] [kinds|kind|types] of [tasks|questions|work|jobs|things] [can|could|do] you [do|answer|solve|handle|understand|take on]?",
        "[How|With what|Where|In which way] [can|could|do] you [help|assist|support][| me| us| people]?",
        "[What|Which] [tasks|skills|features|abilities|functions|tricks] [do you have|can you do|do you know|have you got]?",
        "What are you [able to do|good at|made for|good for|there for|capable of|trained for]?",
        "[I need|I want|I would like] [your help|some help|help|a hand][.|!|]", "[Show|Tell|List] me [what you can do|your skills|your features|your abilities|what you are good at][|, please].",
    ),
    "thanks": (
        _TY + _FOR + "[,|.|!| -] [that's|that is|that was|it was|you were|this is] [exactly|just|really|so|very|] [what I needed|helpful|useful|kind|great|perfect|a big help|all I needed|lovely|all|enough|nice of you][!|.|]",
        "[Great|Perfect|Awesome|Wonderful|Super|Nice|Excellent|Fantastic|Lovely|Cool|Ok|Okay|Good|Amazing|Ah|Yes|Right][,|!|.] [|||that's [it|right|what I needed|what I was looking for|all I need|very kind|good to know][,|.|!]] " + _TY + _FOR + "[!|.|]",
        _TY + _FOR + "[!|.||!!| :)]",
        "I [really|do|] [appreciate|value] [it|that|your help|this|your time][|, " + _TY + "][.|!]",
        "[You've|You have] been [very|so|really|most] [helpful|kind|useful|patient][.|!|, " + _TY + "]",
        "[That|This|It] [helped|helps|was helping] [a lot|me|so much|very much|me a great deal][.|!|, " + _TY + "]",
        "[You are a star|You're a life saver|You helped me out|You made it easy|I owe you one|You are so kind|You made my week][,|.|!] " + _TY + "[!|.|]",
        _TY + _FOR + "[,|.] [you are a star|you're a life saver|you helped me a lot|I owe you one|you made my week|that helps|that is all I wanted|I got it|I will try that|it works now][!|.|]",
    ),
    "bye": (
        "[I have to|I must|I need to|I've got to|I got to|Got to|I should|Time to] [go|leave|go home|go now|log off|get going|catch my bus|get back to work|hang up|sign off|rush][| now| soon][,|.|!] " + _BYE + "[!|.|]",
        "[I'm|I am] [off|leaving|out|done|gone|going][| for today| home| for lunch| to work][,|.|!] " + _BYE + "[!|.|]",
        "[See you|Until|Talk to you|Till|Meet you] [tomorrow|later|soon|next week|next time|tonight|another day|in a while|again|on [Tuesday|Friday|Sunday]|in the morning][| then][!|.|]",
        "[Have a|Enjoy your|Enjoy the] [nice|good|great|lovely] [day|evening|weekend|week|time][!|.|, " + _BYE + "]",
        "[Bye|Goodbye|Farewell|Ciao|Adios|So long|Cheerio][| for now| then| friend| my friend| Argosy| everyone| and take care| until tomorrow][!|.|!!]",
    ),
    "praise": (
        "[|||Wow, |Oh, |Haha, |Hey, |Yes! ][You are|You're|That's|That is|That was|This is|It is] " + _FEEL + " " + _GOOD + "[|| indeed| for such a small model| my friend|, I like it| work][!|.|]",
        "I [like|love|enjoy|admire] [you|talking to you|your answers|this|how you work|this model][!|.|]",
        "[Well done|Good job|Great work|Nice one|Bravo|Nicely done|Good work|Impressive|Good answer|Great answer|Clever answer][| bot| Argosy| my friend][!|.|]",
        "[You did|You do|You have done] [that|this|it|all of it] [very well|so well|well|right|perfectly][!|.|]", "What a [good|great|smart|clever|nice|cool] [model|answer|bot|assistant|friend][!|.|]",
    ),
    "sorry": (
        "[|||Oh, |Ah, |Oops, |Ok, ][sorry|I'm sorry|I am so sorry|my apologies|my bad|pardon|pardon me|apologies|forgive me|I apologize][| about that| for that| for the confusion| for being late| for the mess][!|.|, I [made a mistake|mistyped|was wrong|misread it|pressed the wrong key|did not mean that|forgot].|, my [mistake|error|fault].]",
    ),
    "okay": (
        "[Ok|Okay|Alright|Fine|Sure|Right|I see|Got it|Understood|Yes|Yep|No|Nah|Cool|Fair enough|Makes sense|Hmm|Aha|Good to know|Interesting|Never mind][,|.] [then|let's go on|I understand|that makes sense|sounds good|as you say|let me think|it is clear|all clear|go on][.|!|]",
        "[Fair enough|Makes sense|Understood|Sounds good|Aha|Good to know|Interesting|Very well|All right|As you wish|No worries][.|!|]",
    ),
    "sad": (
        "I [had|am having|have had] a [bad|awful|horrible|rough|hard|sad|difficult|miserable|lousy|very bad] [day|week|morning|night|time|year|weekend][| at work| at school| at home| today| with my boss].",
        "I [am|feel|'m|am feeling] " + _FEEL + " [sad|tired|ill|sick|lonely|upset|angry|unhappy|down|exhausted|stressed|bored|hurt|scared|worried|bad]" + _WHEN + "[.|]",
        "[My|Our] [dog|cat|bike|car|phone|laptop|train|friend|fish] [died|is sick|broke|is broken|was stolen|got lost|is gone|ran away]" + "[| today| last week| yesterday].",
        "I [lost|broke|missed|forgot] [my|the] [job|keys|train|bus|phone|leg|wallet|flight|game]" + "[| today| again| yesterday].",
        "[Everything|It all|The whole day] [goes wrong|went wrong|was bad|is too much]" + _WHEN + ".", "[I failed|They rejected|I did not pass] my [exam|test|application].",
    ),
    "glad": (
        "[|||Great news! |Good news: |Hooray! |Yay, |Hey, |You know what? |Listen, ]I [got the job|won a prize|passed my exam|got a raise|finished my work|found my keys|won the match|bought a house|got married|got engaged|got accepted|became an uncle]" + "[!|.| today!| yesterday!| at last!]",
        "I [am|feel|'m|am feeling] " + _FEEL + " [happy|good|great|fine|well|excited|proud|cheerful|relaxed|wonderful]" + _WHEN + "[.|!|]",
        "I [had|am having|have had] a [good|great|wonderful|lovely|perfect|fantastic|nice] [day|week|morning|night|time|weekend|holiday][| at work| at home| today| with my friends][.|!]",
        "[My team|We|My sister|My friend] [won|got a baby|passed the test|found a job|made it][!|.| today!]",
    ),
    "joke": (
        "[Tell|Give|Send] me [a|another|one|some|your best] [good|funny|short|silly|nice|clean|new|] [joke|jokes][|, please| please| now][.|!|]",
        "[Do you know|Know|Do you have|Have you got|Have you heard] [a|any|some|another] [good|funny|short|silly|nice|new|] [joke|jokes][| today| about cats| about dogs| to tell]?",
        "[Can|Could|Would|Will] you [tell|make] [|me] [a|another|one] [good|funny|short|silly|nice|] joke[|, please]?",
        "I [need|want|would like|could use] [a [good|little|] laugh|to hear a joke|a joke|some fun|to laugh][.|!|]", "[Make|Please make] me [laugh|smile][.|!|]", "Say something [funny|silly|to make me laugh][.|!|]", "[Cheer me up|Entertain me|Be funny][|, please][.|!|]",
    ),
    "ready": ("[Are|Is] [you|everything|the model|the server] [ready|online|working|running|awake|up|alive][| now| today| for work| to start]?", "[Can|Do] you [hear|read|see] [me|this|my message]?", "[Testing|Test], [one two three|1 2 3|testing|hello][.|]"),
    "week": ("[List|Name|Write|Give me|Tell me|Say|Show me|Enumerate] [all|] [the|] [seven|7|] [days of the week|weekdays from Monday to Sunday|days in a week][|, in order|, starting with Monday][.|]", "[What|Which] [days|seven days] [are there|are] in a week?", "What are the [seven|7] days[| of the week| called]?"),
    "months": ("[List|Name|Write|Give me|Tell me|Say|Show me] [all|] [the|] [twelve|12|] months[| of the year| of a year| in order| from January to December][|, please][.|]", "[What|Which] [are the|] [months|twelve months] [are there|are] in a year?"),
    "alphabet": ("[List|Write|Give me|Tell me|Say|Show me|Recite|Sing] [all|] the [alphabet|letters of the alphabet|26 letters|English alphabet|letters from a to z|ABC][|, please][.|]", "[What|Which] letters [are|are there] in the alphabet?"),
    "seasons": ("[List|Name|Write|Give me|Tell me] [all|] [the|] [four|4|] seasons[| of the year| of a year][|, please][.|]", "[What|Which] [four|] seasons [are there|does a year have]?"),
    "primary": ("[List|Name|Write|Give me|Tell me] [the|] [three|3] [primary|basic|main|] [colours|colors][|, please][.|]", "[What|Which] are the [three|] [primary|basic|main] [colours|colors]?"),
}  # fmt: skip
"""Patterns by intent; a test expands each many times."""
