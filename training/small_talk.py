"""Small talk that needs no media. Held-out phrasings are separate."""

from __future__ import annotations

from training.phrasings import Phrasings, lines

CHAT_ANSWERS = {
    "hello": "Hello! Show me a picture of a shape and ask me about it.",
    "who": "I am a tiny model that sees and hears. I was made to try out this server.",
    "can": "I name colours and shapes, say where they are, count up to four, compare two pictures, "
    "see which way a shape moves in a video, and hear tones, beeps and spoken digits.",
    "how": "I am fine, thank you.",
    "thanks": "You are welcome.",
    "bye": "Goodbye!",
}

CHAT: dict[str, Phrasings] = {
    "hello": Phrasings(
        lines("""
            Hello
            Hello!
            Hello.
            Hi
            Hi!
            Hey
            Hey!
            Hello there
            Hello there!
            Hi there
            Good morning
            Good morning!
            Good evening!
            Good day
            Greetings!
            Hello, model!
            Hi, are you there?
            """),
        lines("""
            Hi there!
            Hey there!
            Hi.
            Good evening.
            Good day!
            Hello, are you there?
            """),
    ),
    "who": Phrasings(
        lines("""
            Who are you?
            Who are you
            What are you?
            What is your name?
            What's your name?
            Tell me who you are.
            Tell me your name.
            Introduce yourself.
            Which model are you?
            What model is this?
            What kind of model are you?
            Are you a model?
            """),
        lines("""
            Can you tell me who you are?
            What model are you?
            Please introduce yourself.
            Please tell me your name.
            Tell me what you are.
            """),
    ),
    "can": Phrasings(
        lines("""
            What can you do?
            What can you do
            What can you do for me?
            What do you do?
            How can you help me?
            How can you help?
            Help
            Help me.
            Can you help me?
            What can I ask you?
            What can I ask?
            What are you able to do?
            Tell me what you can do.
            What are you good at?
            What do you know?
            """),
        lines("""
            Help!
            Please help me.
            Can you help?
            Please tell me what you can do.
            What can you help me do?
            """),
    ),
    "how": Phrasings(
        lines("""
            How are you?
            How are you
            How are you today?
            Hello, how are you?
            How do you feel?
            How is it going?
            Are you well?
            How are you doing?
            """),
        lines("""
            Hi, how are you?
            How are you doing today?
            How do you feel today?
            """),
    ),
    "thanks": Phrasings(
        lines("""
            Thank you
            Thank you!
            Thank you.
            Thanks
            Thanks!
            Thank you very much.
            Thanks a lot!
            Many thanks.
            Great, thank you.
            Good, thanks!
            Thank you for your help.
            """),
        lines("""
            Thanks.
            Thank you very much!
            Thanks for your help!
            Great, thanks!
            Many thanks!
            """),
    ),
    "bye": Phrasings(
        lines("""
            Goodbye
            Goodbye!
            Bye
            Bye!
            Bye bye
            Good bye!
            Good night
            Good night!
            See you
            See you later!
            See you soon.
            Goodbye, model!
            """),
        lines("""
            Goodbye.
            Bye.
            Bye bye!
            See you!
            See you later.
            """),
    ),
}
