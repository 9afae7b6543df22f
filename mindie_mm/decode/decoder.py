"""The decoder process, which decodes one media item at a time from an open file to its scratch memory."""

from __future__ import annotations

import os
import traceback
from contextlib import ExitStack, nullcontext

import msgspec

from mindie_mm.decode.decoder_messages import (
    MAX_FRAMES,
    DecoderFailure,
    FromDecoder,
    PlanItem,
    Planned,
    Refused,
    ToDecoder,
    Written,
)
from mindie_mm.decode.parcel import Parcel, unpacked
from mindie_mm.decode.planning import plan_item
from mindie_mm.decode.scratch import Scratch
from mindie_mm.errors import LimitExceeded, MediaError, MindieMMError, OperationalError
from mindie_mm.media.guard.caps import decoding_to_count, under
from mindie_mm.nn.family import Processor, Write
from mindie_mm.processes.receiving import ReceivingChannel
from mindie_mm.settings.config import MediaCaps


class Decoder:
    """Object that plans media items and writes their arrays. Its only state is the last item."""

    def __init__(self, processor: Processor, caps: MediaCaps, scratch: Scratch) -> None:
        self._processor = processor
        self._scratch = scratch
        self.caps = caps
        self._write: Write | None = None
        """Function that writes the item that was planned last."""

    def answer(self, message: ToDecoder, descriptors: list[int]) -> FromDecoder:
        """Handle `message` and return the reply. Close `descriptors` before parsing the media file."""
        with ExitStack() as stack:
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            try:
                if isinstance(message, PlanItem):
                    return self._planned(message.item, descriptors[0], stack)
                if message.item is not None:
                    self._planned(message.item, descriptors[0], stack)
                write, self._write = self._write, None
                assert write is not None, "an item is planned before it is written"
                with under(self.caps, limits_request_pixels=False):  # planning has already counted all pixels
                    write(self._scratch.arrays(message.layout))
                return Written()
            except MindieMMError as error:
                return Refused(DecoderFailure.of(error))
            except Exception as error:  # noqa: BLE001 - an error fails the item, not the process
                return _refused(error)

    def _planned(self, parcel: Parcel, descriptor: int, stack: ExitStack) -> Planned:
        self._write = None
        try:
            data = unpacked(parcel, descriptor)
        except (OSError, ValueError) as error:
            raise MediaError(f"the file cannot be read or has changed: {error}") from error
        stack.close()
        with decoding_to_count() if parcel.decodes_to_count else nullcontext():
            plan, self._write = plan_item(self._processor, parcel.media, data, parcel.counts, self.caps)
        return plan


def serve(channel: ReceivingChannel, decoder: Decoder) -> None:
    """Answer messages until the tokenizer process closes the channel or dies."""
    requests, replies = msgspec.msgpack.Decoder[ToDecoder](ToDecoder), msgspec.msgpack.Encoder()
    while True:
        try:
            message, descriptors = channel.receive()
            channel.send(replies.encode(decoder.answer(requests.decode(message), descriptors)))
        except (EOFError, ConnectionError):
            return


def _refused(error: Exception) -> Refused:
    """Return the reply for an unexpected exception, with its traceback for the tokenizer's log."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        limit = "decoding the request's media needs more memory than the limit allows (--max-decode-bytes)"
        return Refused(DecoderFailure.of(LimitExceeded(limit)))
    frames = "".join(traceback.format_tb(error.__traceback__))[-MAX_FRAMES:]
    return Refused(DecoderFailure.of(OperationalError(f"the decoder failed: {type(error).__name__}")), frames)
