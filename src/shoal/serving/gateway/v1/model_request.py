"""Requests of OpenAI's API as requests to Triton, and their answers.

A language model is asked through a stream, which ends when the client leaves; other models are asked in as many
requests of their ``max_batch_size`` as the rows need, which are sent again if a process dies.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeVar

import grpc  # type: ignore[import-untyped]
from aiohttp import web

from shoal.clients.client.calls import Answer, Call, Method, decode, join, split, to_arrays
from shoal.clients.client.grpc_transport import from_grpc, to_grpc
from shoal.clients.llm.dialects import Dialect, Prompt, find_dialect
from shoal.errors import InputError, ServerError
from shoal.kit.component.spec import ModelSpec
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.sampling import SETTINGS, VARIABLES
from shoal.kit.generation.tools import TOOLS
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.http.bodies import work_apart
from shoal.serving.gateway.http.client_stream import find_metadata, has_left, open_for
from shoal.serving.gateway.refusals import RETRY_SECONDS, FailedError, RefusalReason, RefusedError
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.schema import FieldNames

Take = Callable[[int, Piece], Awaitable[None]]
T = TypeVar("T")
# bytes for each byte of a request: it is held as text, of up to 4 bytes per character, as JSON, and as it is sent
COPIES = 8
_AT_ONCE = 4  # requests in flight for the rows, or prompts, of one
_SETTINGS = {row.name for row in SETTINGS} | {"return_logprobs", "logit_bias", VARIABLES, TOOLS}
_PROMPTS = ("messages", "history", "text_input", "prompt", "prompt_ids")  # inputs
_FIRST = re.compile(r"(\w+)(?:\[(\d+)\])?")  # words of a refusal: an input, and a message of it
_FORMS = {"INT32": Struct("<i"), "UINT32": Struct("<I"), "FP32": Struct("<f")}  # of numbers, by datatype
_STEP = re.compile(r"^in ensemble '[^']*', ")


class ModelRequest:
    """One HTTP request of a caller to the model ``spec``.

    ``held`` is the memory reserved for it: at first for its body, later also for answers that are kept. Refusals of the
    model are explained by the request's ``field_names``.
    """

    def __init__(
        self,
        gate: Gate,
        request: web.Request,
        caller: Caller,
        spec: ModelSpec,
        held: Reservation,
        field_names: FieldNames,
    ) -> None:
        self.request, self.model = request, spec.name
        self._gate, self._caller, self._spec, self._held, self._field_names = gate, caller, spec, held, field_names

    def at(self, spec: ModelSpec) -> ModelRequest:
        """Return a request to a step of the model."""
        return ModelRequest(self._gate, self.request, self._caller, spec, self._held, self._field_names)

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory for so many bytes that the request is about to make, and for their copies.

        Raises:
            RefusedError: there is no room.
        """
        self._gate.traffic.grow(self._held, COPIES * num_bytes)

    async def work(self, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on the request, outside of the event loop if that is large.

        Raises:
            RefusedError: the inputs do not fit the model.
        """
        try:
            return await work_apart(work, self._held.num_bytes // (COPIES + 1))
        except InputError as error:
            raise self._to_error(f"{error.what} {error.fix}") from None

    # --- language models -------------------------------------------------------------------------------------------

    async def generate(
        self, prompts: Sequence[Prompt], settings: Sequence[Mapping[str, Any]], take: Take, *, is_streaming: bool
    ) -> None:
        """Continue prompts, each in a request of its own and with its own settings.

        ``take`` gets each piece, with the number of its prompt.

        A few prompts are in flight at a time, so that many of them do not take the places of other callers.
        All answers are read to their ends, even if one fails or the client leaves: Triton 24.10 can crash when a stream
        is abandoned.

        Raises:
            RefusedError: a prompt or a setting was refused, or an answer was lost.
        """
        dialects = [find_dialect(self._spec.inputs) for _ in prompts]

        rows = list(zip(dialects, prompts, settings, strict=True))
        messages = await self.work(
            lambda: [self._encode(each.to_inputs(text, own, is_streaming=is_streaming)) for each, text, own in rows]
        )
        last: list[Any] = [None] * len(prompts)  # pieces
        failure: RefusedError | None = None
        tag, numbers = secrets.token_hex(8), iter(range(len(messages)))  # ids that no stop request of the caller has
        with open_for(self._gate, self.request, self._caller, self._spec.name, is_whole=not is_streaming) as relay:

            async def send_next() -> None:
                """Send the next prompt, or say that no more come."""
                number = next(numbers, None)
                if number is None or failure is not None or has_left(self.request):
                    await relay.finish()
                    return
                message = messages[number]
                try:
                    await relay.send(self._spec.name, f"{tag}-{number}", message, num_bytes=len(message))
                except RefusedError as refused:
                    await fail(refused)

            async def fail(refused: RefusedError) -> None:
                nonlocal failure
                failure = refused
                relay.leave()
                await relay.finish()

            for _ in range(_AT_ONCE):
                await send_next()
            try:
                async for answer in relay:
                    if failure is not None:
                        continue
                    if answer.lost is not None or answer.message.error_message or answer.request is None:
                        await fail(answer.lost or self._to_error(answer.message.error_message))
                        continue
                    number = int(answer.request.request_id.rpartition("-")[2])
                    if not (answer.is_last and answer.is_empty):
                        last[number] = dialects[number].read(_read_values(answer.message.infer_response))
                        num_bytes = answer.message.ByteSize()
                        self._held.grow(0 if is_streaming else num_bytes)
                        with relay.write():
                            await take(number, last[number])
                    if answer.is_last:
                        if end := self._find_end(dialects[number], last[number]):
                            await take(number, end)
                        await send_next()
            except FailedError as error:
                failure = self._to_refusal(error)
        if failure is None and not has_left(self.request):
            failure = next((cut for each in zip(dialects, last, strict=True) if (cut := self._find_cut(*each))), None)
        if failure is not None:
            raise failure

    def _encode(self, inputs: Mapping[str, Any]) -> bytes:
        """Return the message for Triton that asks with ``inputs``."""
        arrays = to_arrays(self._spec.inputs, inputs, is_batched=self._spec.is_batched)
        message: bytes = to_grpc(Call(Method.INFER, self._spec.name, arrays)).message.SerializeToString()
        return message

    @staticmethod
    def _find_cut(dialect: Dialect, last: Piece | None) -> RefusedError | None:
        try:
            dialect.check_end(last)
        except ServerError as error:
            return RefusedError(RefusalReason.UNAVAILABLE, error.what)
        return None

    def _find_end(self, dialect: Dialect, last: Piece | None) -> Piece | None:
        """Return the last piece of a complete answer of a model that gives no reason."""
        if last is None or last.finish_reason or self._find_cut(dialect, last):
            return None
        return last._replace(text="", logprobs=(), finish_reason=dialect.find_reason(last))

    # --- other models ----------------------------------------------------------------------------------------------

    async def infer(self, values: Mapping[str, Any]) -> Answer:
        """Return the outputs for rows of inputs.

        Raises:
            RefusedError: the inputs were refused, or the model failed.
        """
        spec = self._spec

        def convert() -> tuple[Call, list[Call]]:
            arrays = to_arrays(spec.inputs, values, is_batched=spec.is_batched)
            call = Call(Method.INFER, spec.name, arrays, spec=spec)
            return call, split(call, spec.max_batch_size) if spec.is_batched else [call]

        call, calls = await self.work(convert)
        room = asyncio.Semaphore(_AT_ONCE)

        async def ask(part: Call) -> Answer:
            async with room:
                if has_left(self.request):
                    raise ConnectionResetError
                return await self._ask(part)

        tasks = [asyncio.create_task(ask(part)) for part in calls]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        try:
            return answers[0] if len(answers) == 1 else join(call, calls, answers)
        except InputError as error:
            raise self._to_error(f"{error.what} {error.fix}") from None

    async def _ask(self, call: Call) -> Answer:
        body = to_grpc(call).message.SerializeToString()

        async def send(upstream: Upstream, _: str) -> bytes:
            return await upstream.ask("ModelInfer", body, find_metadata(self.request))

        try:
            content = await self._gate.ask(
                self._caller, call.model, body, send, is_waited_for=lambda: not has_left(self.request)
            )
        except FailedError as error:
            raise self._to_refusal(error) from None
        self._held.grow(len(content))
        return self._read(_parse(content), call)

    def _read(self, message: Any, call: Call | None = None) -> Answer:
        answer: Answer = from_grpc(call or Call(Method.INFER, self._spec.name, spec=self._spec), message)
        return answer

    def _to_refusal(self, error: FailedError) -> RefusedError:
        """Return the refusal for Triton's answer with an error: of a full queue, say, one to try again after."""
        if error.status is grpc.StatusCode.UNAVAILABLE:
            return RefusedError(RefusalReason.UNAVAILABLE, error.message, RETRY_SECONDS)
        return self._to_error(error.message)

    def _to_error(self, message: str) -> ApiError:
        """Return the refusal with a component's message, whose first word may be an input, as the request has it."""
        message, field_names = _STEP.sub("", message), self._field_names
        if re.search(r"the model's context is|context has", message):
            place = field_names.max_tokens if "max_tokens" in message else field_names.prompt
            return ApiError(message, place or None, "context_length_exceeded")
        found = _FIRST.match(message)
        word, index = found.groups() if found else ("", None)
        if found and field_names.prompt and word in _PROMPTS:
            place = field_names.find(int(index)) if index else field_names.prompt
            message = place.removesuffix(".content") + message[len(found[0]) :]
            return ApiError(message, place)
        setting = field_names.settings.get(word, word if word in _SETTINGS else None)
        if word == VARIABLES and setting != word:  # a field that becomes a variable
            message = f"{setting} is sent, and the model's chat template does not read it. Leave it out."
        return ApiError(message, setting)


def _read_values(message: Any) -> dict[str, Any]:
    """Return the outputs of an answer of one row: plain values, since this is done for every token; or arrays."""
    found: dict[str, Any] = {}
    for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        if output.datatype == "BYTES" and len(raw) >= 4 and int.from_bytes(raw[:4], "little") == len(raw) - 4:
            found[output.name] = raw[4:]
        elif (form := _FORMS.get(output.datatype)) and len(raw) == form.size:
            (found[output.name],) = form.unpack(raw)
        else:
            found[output.name] = decode(output.datatype, list(output.shape), memoryview(raw))
    return found


def _parse(content: bytes) -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2.ModelInferResponse.FromString(content)
