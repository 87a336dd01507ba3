"""What a quantized model is compared with: windows of several texts, and the float model's answers on
them."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nybble.models import ModelSource

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 512
# Windows of each text. `topics` are the odd entries of pydoc_data.topics, of which calibration takes the even
# ones; `code` is the standard library's source, `mail` the messages of CPython's tests of its email package.
WINDOWS = {"topics": 40, "code": 8, "mail": 8}
CODE = ("heapq.py", "textwrap.py", "shlex.py", "csv.py", "fractions.py", "statistics.py")


@dataclass
class End:
    """A model's last hidden states on one text [windows, seq_len, hidden], its last norm and its head."""

    hidden: "Tensor"
    norm: "Tensor"
    head: "Tensor"


def texts() -> dict[str, str]:
    """The held-out texts that this Python has."""
    from nybble.quant.calibration import evaluation_text

    library = Path(sysconfig.get_paths()["stdlib"])
    found = {"topics": evaluation_text()}
    found["code"] = "\n\n".join((library / name).read_text(encoding="utf-8") for name in CODE)
    mails = sorted((library / "test" / "test_email" / "data").glob("msg_*.txt"))
    if mails:
        found["mail"] = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in mails)
    return found


def encoder(source: ModelSource) -> Any:
    from nybble.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(source.tokenizer_files)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def windows_of(source: ModelSource) -> dict[str, NDArray[np.int64]]:
    """Token windows [windows, seq_len] of each text."""
    from nybble.quant.quality import evaluation_windows

    encode, found = encoder(source), {}
    for name, text in texts().items():
        ids = np.asarray(encode(text))
        found[name] = evaluation_windows(ids, min(WINDOWS[name], len(ids) // LENGTH), LENGTH)
    return found


def ends_of(provider: Any, windows: dict[str, NDArray[np.int64]]) -> dict[str, End]:
    """A model's end on every text, all passed through its layers together."""
    import torch

    from nybble.quant.forward import embed, forward_layer, to_torch

    spec = provider.spec
    with torch.no_grad():
        embedding = to_torch(provider.tensor(spec.embedding_name))
        hidden = embed(spec, embedding, np.concatenate(list(windows.values())))
        for layer in range(spec.num_layers):
            weights = {name: to_torch(provider.tensor(name)) for name in spec.layer_tensors(layer)}
            forward_layer(spec, layer, weights, hidden)
        norm = to_torch(provider.tensor(spec.final_norm_name))
        head = embedding if spec.tied_embeddings else to_torch(provider.tensor(spec.head_name))
    parts = hidden.split([len(ids) for ids in windows.values()])
    return {name: End(part, norm, head) for name, part in zip(windows, parts, strict=True)}


def compare(
    provider: Any,
    windows: dict[str, NDArray[np.int64]],
    reference: dict[str, End] | None,
    ends: dict[str, End] | None = None,
) -> dict[str, dict[str, float]]:
    """Per text, of a model whose `ends` are computed where they are not given: `perplexity`; against a
    reference also `kl` (mean, in nats) and `top1`, the share of positions with the same most likely token."""
    import torch

    from nybble.quant.forward import head_logits

    found = {}
    for name, end in (ends or ends_of(provider, windows)).items():
        loss = divergence = 0.0
        same = 0
        ids = torch.from_numpy(windows[name])
        for window, tokens in enumerate(ids):
            with torch.no_grad():
                own = head_logits(provider.spec, end.norm, end.head, end.hidden[window]).log_softmax(-1)
                loss -= float(own[:-1].gather(1, tokens[1:, None]).double().sum())
                if reference is not None:
                    other = reference[name]
                    wanted = head_logits(
                        provider.spec, other.norm, other.head, other.hidden[window]
                    ).log_softmax(-1)
                    divergence += float((wanted.exp() * (wanted - own)).sum(-1).double().sum())
                    same += int((wanted.argmax(-1) == own.argmax(-1)).sum())
        found[name] = {"perplexity": float(np.exp(loss / (ids.numel() - len(ids))))}
        if reference is not None:
            found[name] |= {"kl": divergence / ids.numel(), "top1": same / ids.numel()}
    return found
