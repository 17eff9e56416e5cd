"""The weights of a model as they are now, in Hugging Face layout: those of a checkpoint in shares too."""

from attnres.folders import refuse_other
from attnres.paths import user_path
from attnres.training.checkpoint import stored_state
from attnres.training.shares import SHARES, saved_buffers, unfilled


def export_weights(name: str, out: str, *, trust_remote_code: bool = False) -> str:
    """Write the model of a run, a checkpoint or any model with depth reads in Hugging Face layout, with its tokenizer.

    Returns:
        What was written, in a few lines.

    Raises:
        UserError: no model there, one that is damaged, or a folder that is not empty.
    """
    from attnres.models import export_model
    from attnres.models.export import write_model
    from attnres.models.open import open_config

    path = user_path(name)
    finished = (path / "model" / "config.json").is_file() and not (path / SHARES).is_dir()
    folder = path if (path / SHARES).is_dir() or finished else path / "checkpoint"
    if not (folder / SHARES).is_dir():
        return export_model(name, out, trust_remote_code=trust_remote_code)
    from attnres.scale.sharded_checkpoint import load_shards

    target = refuse_other(out)
    state = stored_state(folder)
    model = unfilled(folder, state)
    tensors = {**dict(model.named_parameters()), **saved_buffers(model)}
    load_shards(folder / SHARES, {f"model.{key}": tensor.detach() for key, tensor in tensors.items()})
    write_model(model.eval(), target, open_config(folder / "model").files_beside(), source=name)
    return f"{name} at step {state['step']} -> {out}"
