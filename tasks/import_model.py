"""import_model: a Hugging Face folder, a .gguf file, or the toy model shipped here -> policy 0, shared by runs."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import JsonValue

from data.config import LayoutConfig
from data.digest import file_digest
from data.manifest import Manifest
from models.engines.contract import RolloutEngine
from models.folder import read_config
from models.megatron.fit import require_fit
from models.megatron.shape import ModelShape
from models.sources import GGUF_DTYPE, find_model
from tasks.step import Job, Pending, Run, Step, perform

STEP = Step("import_model", version=1, kind="policy")
TOY = "xs"
IMPORTED = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model")


def import_model(run: Run, path: str) -> Manifest | Pending:
    """The model as version 0 of a policy, copied into the store. Equal files are imported once, wherever they lie.

    Raises FileNotFoundError for a path that leads nowhere, FolderError for what is no model of a known family.
    """
    place = None if path == TOY else find_model(path)
    return perform(run, STEP, None, {}, _content(place), 0, run.engine, _import, (place,))


def require_layout(path: str, layout: LayoutConfig) -> None:
    """Raises ValueError, with the valid sizes, for a layout that does not divide the model of a local folder.

    The shape of the toy and of a .gguf file is known to the trainer, which refuses such a layout in its first step.
    """
    folder = Path(path).expanduser()
    if path != TOY and (folder / "config.json").is_file():
        read_config(folder)  # names the families, if this is none of them
        require_fit(ModelShape.from_hf(folder), layout)


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder that are kept. Raises FolderError for an unknown family."""
    read_config(folder)  # an unknown family is refused here, before anything is started
    return sorted(file for pattern in IMPORTED for file in folder.glob(pattern))


def _content(place: Path | None) -> dict[str, JsonValue]:
    """What decides the imported model."""
    if place is None:
        return {"toy": TOY}
    if place.is_file():
        return {"gguf": file_digest(place), "dtype": GGUF_DTYPE}
    return {"files": {file.name: file_digest(file) for file in model_files(place)}}


def _import(engine: RolloutEngine, job: Job, place: Path | None) -> Manifest:
    from models.huggingface import inspect
    from models.toy import write_toy
    from models.weights import read_tensors, tensors_digest

    del engine  # only its process is needed: it has transformers loaded
    with TemporaryDirectory(prefix="rollbook-model-") as name:
        copy = Path(name)
        if place is None:
            write_toy(copy)
        elif place.is_file():
            from models.gguf import write_unpacked

            write_unpacked(place, copy)
        else:
            for file in model_files(place):
                shutil.copyfile(file, copy / file.name)
        report = json.loads(json.dumps(asdict(inspect(copy))))
        facts = {**report, "policy_version": 0, "source": str(place or TOY)}
        attempt = job.attempt()
        attempt.add_folder(copy)
        return attempt.commit(content_digest=tensors_digest(read_tensors(copy)), facts=facts)
