"""LLM: the offline face. Prompts in, texts out, in this process and without HTTP."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import OverloadedError, RequestError
from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import FinishReason, Request
from nanoserve.engine.admission import make_request
from nanoserve.engine.build import build_engine
from nanoserve.engine.messages import Update
from nanoserve.loading.pull import pull
from nanoserve.text.chat import RESERVED, ChatTemplate, encode_chat
from nanoserve.text.load import load_tokenizer
from nanoserve.text.stream import Delta, TextStream
from nanoserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one a token, where asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended it

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None  # None where it was given as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """An engine and its tokenizer.

        llm = LLM("smollm2-135m-instruct")
        print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)

    `settings` are the fields of EngineConfig. Raises ConfigError, CheckpointError or PullError. Threads may share
    one; their calls take turns, a step at a time.
    """

    def __init__(self, model: str | os.PathLike[str] = "smollm2-135m-instruct", **settings: Any):
        self.config = EngineConfig(model=os.fspath(model), **settings)
        bars = _Bars()
        try:
            path = pull(self.config.model, revision=self.config.revision, progress=bars)
            # Before the weights: what is wrong with it is told at once.
            self.tokenizer: Tokenizer = load_tokenizer(Path(self.config.tokenizer or path))
            self._engine = build_engine(dataclasses.replace(self.config, model=str(path)), bars)
        finally:
            bars.close()
        # Embedding rows past the tokenizer's last id are padding of the checkpoint's.
        vocab_size = min(self._engine.info.vocab_size, self.tokenizer.vocab_size)
        self.info = msgspec.structs.replace(self._engine.info, vocab_size=vocab_size)
        source = self.tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source, self.tokenizer.special_tokens)
        self._numbers = itertools.count()
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()  # of the engine and of _jobs
        self._left: deque[_Job] = deque()  # whose callers are gone

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); results come in the order of the prompts. One SamplingParams
        serves all, or there is one for each. Raises RequestError, before anything runs, where one cannot be served."""
        many = _as_prompts(prompts)
        params = _one_each(self.default_sampling_params() if sampling_params is None else sampling_params, len(many))
        jobs = [self._job(prompt, sampling) for prompt, sampling in zip(many, params, strict=True)]
        return self._finish(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        if not isinstance(messages, (list, tuple)):
            raise RequestError(f"messages must be a list, not a {type(messages).__name__}", param="messages")
        kwargs = chat_template_kwargs or {}
        if reserved := RESERVED & kwargs.keys():
            raise RequestError(
                f"chat_template_kwargs may not hold {min(reserved)!r}, which is set otherwise",
                param="chat_template_kwargs",
            )
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        template = self._template
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise RequestError("chat_template must be the text of a template", param="chat_template")
            template = ChatTemplate(chat_template, self.tokenizer.special_tokens)
        prompts = [
            self._render(
                conversation,
                template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """The pieces of one answer as they come. Leaving the loop early ends the work."""
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            prompt = self._render(prompt, self._template)
        (sampling,) = _one_each([self.default_sampling_params() if sampling_params is None else sampling_params], 1)
        if sampling.n != 1:
            raise RequestError("a stream has one continuation; n must be 1", param="n")
        job = self._job(prompt, sampling)  # type: ignore[arg-type]
        for _, delta in self._run([job]):
            yield delta
            if delta.finish is not None:
                return

    def default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the model's own, or SamplingParams()."""
        return SamplingParams(**self.info.sampling_defaults)  # type: ignore[arg-type]

    # ---- inside

    def _render(self, messages: Any, template: ChatTemplate | None, **arguments: Any) -> list[int]:
        if template is None:
            raise RequestError("this model has no chat template; use generate, or give chat_template", param="messages")
        return encode_chat(self.tokenizer, template, messages, **arguments)

    def _job(self, prompt: Prompt, sampling: SamplingParams) -> _Job:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        request = make_request(self.info, ids, sampling, id=f"offline-{next(self._numbers)}")
        output = RequestOutput(
            request_id=request.id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=[
                CompletionOutput(i, logprobs=None if sampling.logprobs is None else []) for i in range(sampling.n)
            ],
        )
        return _Job(request, output, [TextStream(self.tokenizer, ids, sampling) for _ in range(sampling.n)])

    def _finish(self, jobs: list[_Job], use_tqdm: bool) -> list[RequestOutput]:
        tokens = 0
        with tqdm(total=len(jobs), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for job, delta in self._run(jobs):
                tokens += len(delta.tokens)
                if delta.finish is not None and not job.unfinished and not job.inbox:
                    bar.update()
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{tokens / elapsed:.1f} tok/s", refresh=False)
        return [job.output for job in jobs]

    def _run(self, jobs: list[_Job]) -> Iterator[tuple[_Job, Delta]]:
        """Feed jobs to the engine as it takes them and step it until all have ended. Several of these loops may
        take turns: a step of one moves the others' jobs too."""
        waiting, running = deque(jobs), list[_Job]()
        try:
            while waiting or running:
                with self._turn():
                    while waiting and self._feed(waiting[0]):
                        running.append(waiting.popleft())
                    if not any(job.inbox for job in running):
                        self._step()
                    rest = [job for job in running if job.unfinished]  # here, where no other thread makes a step
                for job in running:
                    while job.inbox:
                        yield job, job.inbox.popleft()
                running = rest
        finally:
            # Python may come here by collecting garbage, inside a step even: that one then does it at its end.
            self._left.extend(running)
            if not self._lock.locked():
                with self._turn():
                    pass

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine to oneself. At the end, what nobody waits for any more is aborted."""
        with _uninterrupted(), self._lock:
            try:
                yield
            finally:
                while self._left:
                    job = self._left.popleft()
                    self._jobs.pop(job.request.id, None)
                    self._engine.abort(job.request.id)

    def _step(self) -> None:
        for update in self._engine.step():
            job = self._jobs.get(update.request_id)
            if job is None:  # its caller left the loop early
                continue
            delta = job.take(update)
            job.inbox.append(delta)
            if delta.finish is not None and update.finish is None:  # a stop string: the engine knows none
                self._engine.abort(update.request_id, update.index)
            if not job.unfinished:
                del self._jobs[update.request_id]

    def _feed(self, job: _Job) -> bool:
        """False: the queue is full, and has room later."""
        try:
            self._engine.add(job.request)
        except OverloadedError:
            if self._engine.idle:
                raise
            return False
        self._jobs[job.request.id] = job
        return True


class _Job:
    """A request on its way, with the text of each of its continuations."""

    def __init__(self, request: Request, output: RequestOutput, streams: list[TextStream]):
        self.request = request
        self.output = output
        self.streams = streams
        self.unfinished = len(streams)
        self.inbox: deque[Delta] = deque()

    def take(self, update: Update) -> Delta:
        self.unfinished -= update.finish is not None
        output = self.output.outputs[update.index]
        delta = self.streams[update.index].push(update.tokens, update.finish, update.stop_id)
        output.text += delta.text
        output.token_ids += delta.tokens
        if output.logprobs is not None:
            output.logprobs += update.logprobs[: len(delta.tokens)]
        if delta.finish is not None and output.finish_reason is None:
            output.finish_reason, output.stop_reason = str(delta.finish), delta.stop
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, update.cached_tokens)
        return delta


class _Bars:
    """Progress of the start, one bar a part."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: tqdm[Any] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        if what != self._what:
            self.close()
            self._what, self._bar = (
                what,
                tqdm(desc=what, total=total or None, leave=False, dynamic_ncols=True, disable=not on_terminal),
            )
        assert self._bar is not None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: half a step would leave the engine's books torn."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # not Python's to handle, or no Python code here is ever interrupted
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        many = list(prompts)
    except TypeError as error:
        raise RequestError(
            f"prompts must be a text, token ids, or a list, not {prompts!r:.40}", param="prompt"
        ) from error
    try:  # whether they are the ids of one: integers, also those of numpy
        operator.index(many[0] if many else "")  # type: ignore[arg-type]
    except TypeError:
        return many  # type: ignore[return-value]
    return [many]  # type: ignore[list-item]


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(
            f"a prompt must be a text or a list of token ids, not {prompt!r:.40}", param="prompt"
        ) from error


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    if odd := [one for one in each if not isinstance(one, SamplingParams)]:
        raise RequestError(f"sampling_params must be SamplingParams, not {odd[0]!r:.40}", param="sampling_params")
    if len(each) != count:
        raise RequestError(f"{count} prompts came with {len(each)} SamplingParams", param="sampling_params")
    return each


__all__ = ["LLM", "CompletionOutput", "FinishReason", "RequestOutput", "SamplingParams"]
