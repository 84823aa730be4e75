"""From a job to a sequence that can run, or to a refusal that says what to change. Nothing runs here."""

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from proto.deploy import OUTPUTS, ArStage
from proto.errors import InvalidRequest, OmniError
from proto.ids import StageName
from proto.params import SamplingParams
from stages.ar.detokenizer import Decode, Detokenizer
from stages.ar.loading import LoadedModel
from stages.ar.prompt import PromptReader, answer_length
from stages.ar.sampling import Sampler, decide
from stages.ar.sequence import Sequence as Work
from stages.engine import Job

EDGE_ONLY: Final = frozenset({"kv"})
"""Outputs that no caller can be given, for there is no one value that holds them."""


class Intake:
    """Checks jobs against one loaded model. `outputs` are those that it can give."""

    def __init__(self, stage: StageName, spec: ArStage, loaded: LoadedModel, outputs: tuple[str, ...]) -> None:
        self._stage = stage
        self._loaded = loaded
        self._outputs = outputs
        self._reader = PromptReader(loaded.tokenizer, spec.prompt, vocabulary=loaded.vocabulary, context=loaded.context)
        self._decode = decoder_of(loaded.tokenizer)

    def sequence(self, job: Job) -> Work:
        """Raises `InvalidRequest` naming the stage and the field."""
        try:
            return self._sequence(job)
        except OmniError as error:
            info = error.info
            raise type(error)(f"stage {self._stage}: {info.message}", stage=self._stage, field=info.field) from error

    def _sequence(self, job: Job) -> Work:
        params = self._params(job)
        self._check_outputs(job)
        prompt = self._reader.read(job)
        generation = self._loaded.generation
        return Work(
            job=job,
            prompt=prompt,
            max_tokens=answer_length(params.max_tokens, generation.max_new_tokens, self._loaded.context - len(prompt)),
            sampler=Sampler(decide(params, generation)),
            detokenizer=Detokenizer(self._decode, params.stop or ()),
        )

    def _params(self, job: Job) -> SamplingParams:
        if not isinstance(job.params, SamplingParams):
            raise InvalidRequest("params are those of a diffusion stage; this stage generates text", field="params")
        if job.params.extra:
            raise InvalidRequest(
                f"params.extra holds {sorted(job.params.extra)}; the built-in AR engine takes none", field="extra"
            )
        return job.params

    def _check_outputs(self, job: Job) -> None:
        for name in (*job.emit, *job.publish):
            if name not in self._outputs:
                known = name in OUTPUTS["ar"]
                why = "this model cannot give it" if known else f"it has {', '.join(self._outputs)}"
                raise InvalidRequest(f"output {name!r} is not to be had: {why}", field="outputs")
        for name in EDGE_ONLY.intersection(job.emit):
            raise InvalidRequest(f"output {name!r} can go to another stage only, not to a caller", field="outputs")


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's text for ids, as a `Detokenizer` needs it."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return decode
