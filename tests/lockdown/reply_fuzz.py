"""A fuzzer of decoder replies, which runs in a decoder. `ATTACK` is the source of an attack for `attacker.running`."""

from __future__ import annotations

ATTACK = r"""
import ctypes, os, random, struct, sys, time

dice = random.Random(SEED)
STRANGE = [None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 1.5, float("nan"), "", "item", "embeddings", "a" * 5000,
           chr(0), b"bytes", [], {}, [1] * 7, {"shape": [1], "dtype": "int64"},
           {"item": {"shape": [4], "dtype": "int64"}}]

def mutated(value, depth=0):
    "Return a copy of a value in which some parts are strange."
    if dice.random() < 0.15:
        return dice.choice(STRANGE)
    if isinstance(value, dict):
        changed = {key if dice.random() > 0.05 else "item": mutated(one, depth + 1) for key, one in value.items()}
        return changed if dice.random() > 0.1 else {**changed, "more": dice.choice(STRANGE)}
    if isinstance(value, (list, tuple)):
        return [mutated(one, depth + 1) for one in value] * dice.choice([1, 1, 1, 2])
    if type(value) is int and dice.random() < 0.3:
        return value + dice.choice([-1, 1, 4, 2**20, -2 * value])
    return value

def flipped(data):
    data = bytearray(data)
    for _ in range(dice.randint(1, 8)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)

def frame(data):
    return struct.pack("!i", len(data)) + data

def send(data):
    os.write(3, data)

def other(data):
    "Return the bytes of another reply."
    kinds = [{"type": "written"}, {"type": "planned"}, {"type": "ready"}, {"type": "forked", "pid": 1}]
    kinds += [refusal(dice.choice(NAMES)), {}, [], 7]
    return msgspec.msgpack.encode(dice.choice(kinds))

NAMES = ["MediaError", "InputError", "LimitExceeded", "OperationalError", "Miscounted", "ProcessDied",
         "NoProcess", "ZeroDivisionError", "MindieMMError", "UnsupportedCheckpoint", "ServiceStopping"]

def refusal(name):
    return {"type": "refused", "error": {"type": "failed", "name": name, "message": "x" * dice.choice([1, 10**5])},
            "frames": dice.choice(["", "x", "line" + chr(10) + "line"])}

def late(data):
    time.sleep(dice.random() / 2)
    return data

def twice(data):
    send(frame(data))
    return data

def twice_late(data):
    send(frame(data))
    time.sleep(0.05)
    return data

def flood(data):
    for _ in range(200):
        send(frame(data))
    return data

def ends(data):
    os._exit(dice.choice([0, 1]))

def crashes(data):
    ctypes.memset(8, 1, 1)

def closes(data):
    os.close(3)
    time.sleep(5)
    os._exit(0)

def truncated(data):
    send(frame(data)[: dice.randrange(len(data))])
    os._exit(0)

def too_long(data):
    send(struct.pack("!i", dice.choice([-1, 2**31 - 1, 2**20 + 1])))
    return data

def empty(data):
    return b""

def changed(data):
    return msgspec.msgpack.encode(mutated(msgspec.msgpack.decode(data)))

ACTS = [changed] * 12 + [flipped] * 4 + [other] * 4
ACTS += [late, twice, twice_late, flood, ends, crashes, closes, truncated, too_long, empty]

def attack():
    data = msgspec.msgpack.encode(go_on())
    return raw(dice.choice(ACTS)(data))
"""


def attack(seed: int) -> str:
    """Return the source of an attack that draws its replies with `seed`."""
    return f"SEED = {seed}\n{ATTACK}"
