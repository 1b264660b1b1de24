"""Looking at the model while it is trained: at every evaluation, samples and the microscope's measures.

Called with each line of the log, it gives the lines that follow from it. Time spent here is not training time: the
loop's clock stands still while a line is passed on. TensorBoard, where it is installed, gets the numbers too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from starscope.engine.weights import ArraySource, Weights
from starscope.model import Model
from starscope.tokenizer import Tokenizer
from starscope.train.looks import Looks
from starscope.train.loop import Trainer
from starscope.train.prepare import Prepared
from starscope.train.samples import read_prompts, usual_prompts, write_samples
from starscope.train.settings import Settings

NUMBERS = {  # keys of the log -> TensorBoard's names
    "loss": "loss/train",
    "bits_per_byte": "loss/held_out_bits_per_byte",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "tokens_per_second": "tokens_per_second",
}


def live_model(trainer: Trainer, tokenizer: Tokenizer) -> Model:
    """The model in training as any other: what it computes follows the weights."""
    graph = trainer.engine.graph
    slots = graph.family.slots(graph.hp)
    there = {name: weight for name, weight in trainer.engine.weights.items() if isinstance(weight, Tensor)}
    own = [slot.name for slot in slots if not slot.tied_to or there[slot.name] is not there[slot.tied_to]]
    arrays = {name: there[name].detach().numpy() for name in own}
    weights = Weights(slots, ArraySource(arrays))
    return Model(trainer.folder, weights, tokenizer, trainer.engine)


class Watcher:
    """The looks at one run."""

    def __init__(self, settings: Settings, trainer: Trainer, tokenizer: Tokenizer, data: Prepared) -> None:
        self._settings, self._trainer = settings, trainer
        self._model = live_model(trainer, tokenizer)
        file = data.held_out or data.train
        prompts = read_prompts(settings.prompts, tokenizer)
        if not prompts and settings.sample_tokens:
            documents = [ids for ids, _ in zip(file.split(data.end_of_text), range(64), strict=False)]
            context = self._model.context_length
            prompts = usual_prompts(documents, tokenizer, context, fim=data.fim is not None)
        self._prompts = prompts if settings.sample_tokens else []
        self._looks = Looks(self._model, file.ids, seed=settings.seed)
        self._looked = -1  # the step at which it looked last
        self._board = open_board(str(trainer.folder / "tensorboard"))

    def __call__(self, line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines that follow from one."""
        self._write(line)
        if not self._is_due(line):
            return
        self._looked = step = line["step"]
        found = {"step": step, **self._looks()}
        self._write(found)
        yield found
        if self._prompts:
            yield {"step": step, "samples": write_samples(self._model, self._prompts, self._settings.sample_tokens)}

    def _is_due(self, line: Mapping[str, Any]) -> bool:
        """Whether the model has just been measured, or would have been if something were held out."""
        if self._trainer.held_out is not None:
            return "bits_per_byte" in line
        every = self._settings.evaluate_every
        crossed = line["step"] // every > max(self._looked, 0) // every
        return "loss" in line and (crossed or line["step"] == self._settings.steps)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._board is None:
            return
        for key, name in NUMBERS.items():
            if key in line:
                self._board.add_scalar(name, line[key], line["step"])
        for key in ("induction", "lens_loss"):
            for block, value in enumerate(line.get(key, ())):
                self._board.add_scalar(f"{key}/block_{block}", value, line["step"])

    def close(self) -> None:
        """Bring what TensorBoard has not written yet to the disk."""
        if self._board is not None:
            self._board.close()


def open_board(folder: str) -> Any:
    """TensorBoard's writer, None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder)
