"""Phrasings of questions about images, videos and sounds. Held-out phrasings are separate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Templates of one question. `{n}` is a noun for the medium, and `{t}` a noun for the object."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


QUESTIONS: dict[str, Phrasings] = {
    "what": Phrasings(
        lines("""
            What is in the {n}?
            What is in this {n}?
            What's in the {n}?
            What's in this {n}?
            What do you see?
            What do you see in the {n}?
            What can you see in this {n}?
            What is this?
            What is it?
            What does the {n} show?
            What does this {n} show?
            What is shown in the {n}?
            What is there in the {n}?
            Describe the {n}.
            Describe this {n}.
            Describe what you see.
            Please describe the {n}.
            Tell me what is in the {n}.
            Tell me what this is.
            Name the object in the {n}.
            Which object is in the {n}?
            What object is this?
            Can you tell me what is in the {n}?
            What is the object in this {n}?
            Describe the object.
            Describe the {n} briefly.
            """),
        lines("""
            What can you see in the {n}?
            What is shown in this {n}?
            Please describe this {n}.
            Tell me what you see.
            Can you describe the {n}?
            Which object do you see in the {n}?
            What object is in the {n}?
            Name the object in this {n}.
            """),
    ),
    "colour": Phrasings(
        lines("""
            What colour is it?
            What color is it?
            What colour is this?
            What color is this?
            What colour is the {t}?
            What color is the {t}?
            Which colour is it?
            Which color is the {t}?
            What is the colour of the {t}?
            What is the color of the {t}?
            What colour is the {t} in the {n}?
            What color is the {t} in this {n}?
            What colour do you see?
            Which colour does the {t} have?
            Which color does the {t} have?
            Name the colour.
            Name the color of the {t}.
            Tell me the colour of the {t}.
            Tell me the color.
            Can you name the colour of the {t}?
            """),
        lines("""
            Which colour is the {t}?
            What color do you see?
            What is the colour of the {t} in the {n}?
            Tell me the color of the {t}.
            Name the colour of the {t}.
            What color does the {t} have?
            Tell me what colour it is.
            """),
    ),
    "shape": Phrasings(
        lines("""
            Which shape is it?
            What shape is it?
            Which shape is this?
            What shape is this?
            What shape is in the {n}?
            Which shape is in this {n}?
            Which shape do you see?
            Which shape do you see in the {n}?
            What is the shape?
            What is the shape of the object?
            What shape does the object have?
            Which shape does the {n} show?
            What shape is shown in the {n}?
            Name the shape.
            Name the shape of the object.
            Tell me the shape.
            Tell me the shape of the object.
            What kind of shape is it?
            What kind of shape is this?
            What shape is the object?
            """),
        lines("""
            What shape do you see?
            Which shape is the object?
            Which shape does the object have?
            Which shape is shown in the {n}?
            Name the shape in the {n}.
            What kind of shape do you see?
            Tell me which shape it is.
            """),
    ),
    "where": Phrasings(
        lines("""
            Where is the {t}?
            Where is it?
            Where is the {t} in the {n}?
            Where is the {t} in this {n}?
            Where in the {n} is the {t}?
            Where do you see the {t}?
            On which side is the {t}?
            On which side is it?
            On which side of the {n} is the {t}?
            Which side of the {n} is the {t} on?
            Which side is the {t} on?
            Is the {t} at the left, right, top or bottom?
            Is it left, right, top or bottom?
            Tell me where the {t} is.
            Where can you see the {t}?
            """),
        lines("""
            Where in this {n} is the {t}?
            Which side is it on?
            On which side of this {n} is the {t}?
            Where do you see the {t} in the {n}?
            Tell me where it is.
            Can you tell me where the {t} is?
            """),
    ),
    "count": Phrasings(
        lines("""
            How many {p} are there?
            How many {p} are in the {n}?
            How many {p} are in this {n}?
            How many {p} do you see?
            How many {p} can you see?
            How many {p} does the {n} show?
            How many {p} are shown?
            How many are there?
            Count the {p}.
            Count the {p} in the {n}.
            Count how many {p} there are.
            Can you count the {p}?
            What is the number of {p}?
            Tell me how many {p} there are.
            Tell me the number of {p} in the {n}.
            """),
        lines("""
            How many {p} do you see in the {n}?
            How many {p} are there in this {n}?
            How many {p} are shown in the {n}?
            Count the {p} in this {n}.
            Tell me the number of {p}.
            Can you count the {p} in the {n}?
            """),
    ),
    "same colour": Phrasings(
        lines("""
            Do both {n}s show the same colour?
            Do both {n}s show the same color?
            Do the two {n}s show the same colour?
            Is the colour the same in both {n}s?
            Is the color the same in both?
            Do the {n}s have the same color?
            Do they have the same colour?
            Are the colours the same?
            Are the two colors the same?
            Are both shapes the same colour?
            Have both {n}s the same colour?
            Do both shapes have the same color?
            """),
        lines("""
            Do the two {n}s show the same color?
            Do both {n}s have the same colour?
            Are both colours the same?
            Is the colour the same in the two {n}s?
            Do they show the same color?
            """),
    ),
    "same shape": Phrasings(
        lines("""
            Do both {n}s show the same shape?
            Do the two {n}s show the same shape?
            Do these {n}s show the same shape?
            Is the shape the same in both {n}s?
            Is the shape the same in both?
            Do the {n}s have the same shape?
            Do they have the same shape?
            Are the shapes the same?
            Are the two shapes the same?
            Have both {n}s the same shape?
            Do both objects have the same shape?
            """),
        lines("""
            Do both {n}s have the same shape?
            Are both shapes the same?
            Is the shape the same in the two {n}s?
            Do they show the same shape?
            Do the two objects have the same shape?
            """),
    ),
    "both": Phrasings(
        lines("""
            What is in the two {n}s?
            What is in the {n}s?
            What is in both {n}s?
            What do the {n}s show?
            What do the two {n}s show?
            What do you see in the two {n}s?
            Describe both {n}s.
            Describe the two {n}s.
            Tell me what is in both {n}s.
            """),
        lines("""
            What do both {n}s show?
            What do you see in both {n}s?
            Describe the {n}s.
            Tell me what is in the two {n}s.
            """),
    ),
    "motion": Phrasings(
        lines("""
            Which way does the {t} move?
            Which way does it move?
            Which way is the {t} moving?
            Which way is it moving?
            Which way does the {t} go?
            In which direction does the {t} move?
            In which direction does it move?
            In which direction is the {t} moving?
            What direction does the {t} move in?
            Which direction is it going?
            Where does the {t} move?
            Where is the {t} going?
            Where is it moving?
            How does the {t} move?
            How does the {t} move in the {n}?
            Tell me which way the {t} moves.
            Does it move left, right, up or down?
            """),
        lines("""
            Which way is the {t} going?
            Which way does the {t} move in the {n}?
            In which direction is it moving?
            What direction is the {t} moving in?
            Where does it move?
            Does the {t} move left, right, up or down?
            """),
    ),
    "hear": Phrasings(
        lines("""
            What do you hear?
            What can you hear?
            What is it that you hear?
            What is in the {n}?
            What is in this {n}?
            What is to be heard in the {n}?
            What do you hear in the {n}?
            What can you hear in this {n}?
            Describe the {n}.
            Describe what you hear.
            Tell me what you hear.
            Tell me what is in the {n}.
            Please describe the {n}.
            """),
        lines("""
            What can you hear in the {n}?
            What do you hear in this {n}?
            Please describe what you hear.
            Describe this {n}.
            Tell me what you hear in the {n}.
            """),
    ),
    "tone": Phrasings(
        lines("""
            Is the tone high, middle or low?
            Is it high, middle or low?
            Is this tone high, middle or low?
            Is the tone low, middle or high?
            How high is the tone?
            How high is this tone?
            How high is it?
            What tone do you hear?
            Which tone is it?
            Which tone is this?
            What kind of tone is it?
            What kind of tone is in the {n}?
            Which tone is in the {n}?
            Tell me how high the tone is.
            Name the tone.
            """),
        lines("""
            Which tone do you hear?
            What kind of tone is this?
            How high is the tone in the {n}?
            What kind of tone do you hear?
            Is the tone in the {n} high, middle or low?
            """),
    ),
    "beeps": Phrasings(
        lines("""
            How many beeps are there?
            How many beeps do you hear?
            How many beeps can you hear?
            How many beeps are in the {n}?
            How many beeps are in this {n}?
            How many beeps were there?
            How many tones do you hear?
            How often does it beep?
            How many times does it beep?
            Count the beeps.
            Count the beeps in the {n}.
            Can you count the beeps?
            What is the number of beeps?
            Tell me the number of beeps.
            Tell me how many beeps there are.
            """),
        lines("""
            How many beeps do you hear in the {n}?
            How many beeps are there in this {n}?
            Count the beeps in this {n}.
            Tell me how many beeps you hear.
            Can you count the beeps in the {n}?
            """),
    ),
    "digit": Phrasings(
        lines("""
            Which digit is it?
            Which digit is spoken?
            Which digit do you hear?
            Which digit is said?
            Which digit is this?
            What digit is it?
            What digit do you hear?
            What digit is spoken in the {n}?
            Which number is spoken?
            Which number do you hear?
            Which number is it?
            What number is said?
            What number do you hear?
            What is said?
            What is spoken?
            What is being said in the {n}?
            What do they say?
            Write down what is said.
            Name the digit.
            Tell me the digit.
            Tell me the number.
            """),
        lines("""
            What digit is spoken?
            Which digit is said in the {n}?
            What number is spoken in the {n}?
            What is said in the {n}?
            Tell me which digit you hear.
            Name the number.
            """),
    ),
    "all": Phrasings(
        lines("""
            What do you see and hear?
            What can you see and hear?
            Describe what you see and hear.
            Tell me what you see and hear.
            Describe all of it.
            Describe everything.
            What is all this?
            What is in all of them?
            Tell me all that you see and hear.
            Name all that you see and hear.
            What is there to see and to hear?
            """),
        lines("""
            Describe all that you see and hear.
            Please tell me what you see and hear.
            Describe everything that you see and hear.
            Tell me everything that you see and hear.
            """),
    ),
}
