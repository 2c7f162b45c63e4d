"""A draft model in training: a small Llama with the target's vocabulary learns the target's distribution.

The target's hidden states give its logits for every place of its own answers; the highest ones are learned. The result
is a normal checkpoint. A draft model continues its own drafts, and drafts that count are the target's tokens: so its
ranks of the target's tokens, given the target's text, are the ranks that drafting would have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from bankfull.assembly import Assembled
from bankfull.ops.cost import Cost
from bankfull.text.tokenizer import Tokenizer
from bankfull.train.draft_size import DraftSize
from bankfull.train.gradients import hidden_states, model_with
from bankfull.train.states import Examples
from bankfull.train.trainer import RANKS, Acceptance
from bankfull.weights.drafter_files import CONFIG, write_json, write_tensors

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
TEXT_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files of a checkpoint that its tokenizer is read from."""
LEARNED = 64
"""The target's highest logits of a place: the distribution that is learned."""
AT_ONCE = 512
"""Places whose logits are in memory at once; they are computed again for the gradient."""
EPS, THETA = 1e-5, 10000.0
EMBEDDED = 0.02
"""Standard deviation of the embeddings before training."""


class DraftTrainer:
    name = "draft"
    taps: tuple[int, ...] = ()

    def __init__(
        self, loaded: Assembled, tokenizer: Tokenizer, size: DraftSize, depth: int, seed: int, about: Mapping[str, Any]
    ) -> None:
        """`depth`: drafts whose acceptance is measured. `about`: the recipe, for config.json."""
        self._loaded, self._tokenizer, self.size, self.depth, self._about = loaded, tokenizer, size, depth, about
        device = loaded.device.torch
        self._autocast = device.type == "cuda"
        self._parameters = {name: value.to(device).requires_grad_() for name, value in self._initial(seed).items()}

    def _initial(self, seed: int) -> dict[str, Tensor]:
        """Embeddings are a random projection of the target's head: tokens that it treats alike begin alike."""
        generator, size = torch.Generator().manual_seed(seed), self.size

        def drawn(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

        stored = self._loaded.model.head.stored().dequantize(torch.float32).cpu()
        table = stored @ drawn(stored.shape[1], size.width)
        tensors = {"model.embed_tokens.weight": table * (EMBEDDED / table.std())}
        query, kv = size.heads * size.of_head, size.kv * size.of_head
        for layer in range(size.layers):
            at = f"model.layers.{layer}."
            tensors |= {
                f"{at}self_attn.q_proj.weight": drawn(query, size.width),
                f"{at}self_attn.k_proj.weight": drawn(kv, size.width),
                f"{at}self_attn.v_proj.weight": drawn(kv, size.width),
                f"{at}self_attn.o_proj.weight": drawn(size.width, query, 0.5),
                f"{at}mlp.gate_proj.weight": drawn(size.inner, size.width),
                f"{at}mlp.up_proj.weight": drawn(size.inner, size.width),
                f"{at}mlp.down_proj.weight": drawn(size.width, size.inner, 0.5),
                f"{at}input_layernorm.weight": torch.ones(size.width),
                f"{at}post_attention_layernorm.weight": torch.ones(size.width),
            }
        return {**tensors, "model.norm.weight": torch.ones(size.width)}

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def loss(self, examples: Examples) -> Tensor:
        places, chosen = self._places(examples)
        states = examples.states[chosen]
        total = states.new_zeros((), dtype=torch.float32)
        with torch.autocast(self._loaded.device.kind, torch.bfloat16, enabled=self._autocast):
            hidden = self.hidden(examples)[places]
            for chunk, target in zip(hidden.split(AT_ONCE), states.split(AT_ONCE), strict=True):
                wanted, ids = self._wanted(target)
                # Nothing is random here; keeping the state of a random generator would wait for the device.
                part: Tensor = checkpoint(
                    self._entropy, chunk, wanted, ids, use_reentrant=False, preserve_rng_state=False
                )
                total = total + part
        return total / len(places)

    @torch.no_grad()
    def ranks(self, examples: Examples) -> Tensor:
        places, _ = self._places(examples)
        written = self._ship(np.concatenate([one.answer for one in examples.sequences]))
        ranks = []
        with torch.autocast(self._loaded.device.kind, torch.bfloat16, enabled=self._autocast):
            for chunk, token in zip(self.hidden(examples)[places].split(AT_ONCE), written.split(AT_ONCE), strict=True):
                scores = self._scores(chunk).float()
                ranks.append((scores > scores.gather(1, token[:, None])).sum(-1).clamp_max(RANKS))
        counts = [len(one.answer) for one in examples.sequences]
        return torch.cat([each.unfold(0, self.depth, 1) for each in torch.cat(ranks).split(counts)])

    def draft_cost(self, depth: int) -> Cost:
        return self.size.drafting_cost(depth)

    def save(self, folder: Path, acceptance: Acceptance) -> list[Path]:
        """The dtype is that in which the engine computes both models, so that both keep keys and values alike."""
        build = self._loaded.build
        exact = not build.activations.rounds and build.dtype != torch.float64
        dtype = build.dtype if exact else torch.bfloat16
        tensors = {name: value.detach().to("cpu", dtype) for name, value in self._parameters.items()}
        config = self._config() | {
            "torch_dtype": str(dtype).removeprefix("torch."),
            "bankfull": dict(self._about) | {"acceptance": acceptance.by_position},
        }
        files = self._write_text(folder)
        return [*files, write_json(folder / CONFIG, config), write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})]

    def _config(self) -> dict[str, Any]:
        size = self.size
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": size.width,
            "intermediate_size": size.inner,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv,
            "head_dim": size.of_head,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "vocab_size": size.vocab,
            "max_position_embeddings": self._loaded.model.max_positions,
            "bos_token_id": self._tokenizer.bos_id,
            "eos_token_id": sorted(self._tokenizer.eos_ids),
        }

    def _write_text(self, folder: Path) -> list[Path]:
        """The target's tokenizer."""
        source = self._loaded.files.path
        if source.is_dir():
            names = [name for name in TEXT_FILES if (source / name).is_file()]
            return [Path(shutil.copyfile(source / name, folder / name)) for name in names]
        return [write_json(folder / TOKENIZER, json.loads(self._tokenizer.backend.to_str()))]

    # -- the model

    def hidden(self, examples: Examples) -> Tensor:
        """(sequences * longest, width) the input of the head, from sequences that are padded at the end."""
        counts = [len(one) for one in examples.sequences]
        tokens = np.zeros((len(counts), max(counts)), np.int64)
        for line, one in enumerate(examples.sequences):
            tokens[line, : len(one)] = (*one.prompt, *one.answer)
        return hidden_states(model_with(self._config(), self._parameters), self._ship(tokens))

    def _scores(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._parameters["model.embed_tokens.weight"])

    @torch.no_grad()
    def _wanted(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The target's highest probabilities after these states, and their token ids."""
        with torch.autocast(self._loaded.device.kind, enabled=False):
            logits = self._loaded.model.head(states.to(self._loaded.build.dtype))
        values, ids = logits.float().topk(min(LEARNED, self.size.vocab), -1)
        return values.softmax(-1), ids

    def _entropy(self, hidden: Tensor, wanted: Tensor, ids: Tensor) -> Tensor:
        scores = self._scores(hidden).float()
        return (scores.logsumexp(-1) - (wanted * scores.gather(1, ids)).sum(-1)).sum()

    # -- examples

    def _places(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """The places before each token of the answers: in the padded rectangle, and among the states."""
        longest, first, padded, states = max(len(one) for one in examples.sequences), 0, [], []
        for line, one in enumerate(examples.sequences):
            inside = np.arange(len(one.prompt) - 1, len(one) - 1)
            padded.append(line * longest + inside)
            states.append(first + inside)
            first += len(one)
        return self._ship(np.concatenate(padded)), self._ship(np.concatenate(states))

    def _ship(self, numbers: Any) -> Tensor:
        ship, array = self._loaded.device.ship, np.asarray(numbers, np.int64)
        return torch.from_numpy(array) if ship is None else ship(array)
