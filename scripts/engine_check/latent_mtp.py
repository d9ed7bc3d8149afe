"""A target of DeepSeek V3's kind with several layers of MTP, as a folder, and what vLLM is to draft with them, in float32."""

import json

import draft_models as m
import make_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

LAYERS = 3  # of the target
DENSE = dict(n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=99)


class Slots:
    """A layer's cache as transformers' layers see one. New latents go to the places from `first` on, and what is there and behind is gone."""

    def __init__(self):
        self.first, self.held = 0, None

    def update(self, *given):
        self.held, before = given[:-1], self.held  # behind them is the layer's number
        if self.first:
            self.held = [torch.cat([old[:, :, : self.first], new], 2) for old, new in zip(before, self.held)]
        return self.held


class Layer(torch.nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.block = DeepseekV3DecoderLayer(config, index)
        drawn = m.Random(6 + index)
        for name, x in self.named_parameters():
            x.copy_(drawn.norm(len(x)) if x.dim() == 1 else drawn(*x.shape, scale={"q_proj": 1.4, "o_proj": 3}.get(name.split(".")[-2], 1)))
        self.block.mlp.down_proj.register_forward_pre_hook(lambda module, given: setattr(self, "inside", given[0][0]))

    def named(self, head):
        """Weights by the names that checkpoints have for them."""
        names = {"norm.weight": "shared_head.norm.weight"}
        return {head + names.get(name, name.removeprefix("block.")): x for name, x in self.state_dict().items()}


class LatentMtp:
    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        kind = dict(num_hidden_layers=LAYERS, num_key_value_heads=8, head_dim=64, rope_parameters=make_models.YARN)
        self.target = m.target(folder, transformers.DeepseekV3Config, **kind, **make_models.DEEPSEEK, **DENSE).eval()
        self.target.config._attn_implementation = "eager"
        self.layers = [Layer(self.target.config, LAYERS + i) for i in range(count)]

    def states(self, tokens):
        """[tokens, hidden] of the target's last hidden states."""
        return self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]

    def run(self, index, tokens, states, first, cache):
        """A layer for tokens behind those that have these states, at positions first and on; its hidden states in front of its norm."""
        w, positions = self.layers[index], torch.arange(first, first + len(tokens))
        embedded = self.target.get_input_embeddings()(torch.tensor(tokens)) * (positions > 0)[:, None]
        x = w.eh_proj(torch.cat([w.enorm(embedded), w.hnorm(states)], -1))[None]
        cache.first = first
        seen = torch.arange(first + len(tokens)) <= positions[:, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        turned = self.target.model.rotary_emb(x, positions[None])
        return w.block(x, attention_mask=mask, past_key_values=cache, position_embeddings=turned)[0]

    def learn(self):
        """Fits each layer's last matrix to the target's answers, so that some drafts are right, and saves all. `asked`: the check's prompts and the answers."""
        answers = m.answers_of(self.target, m.COUNT + 4)
        self.asked = answers[: len(m.LENGTHS)]
        states = [self.states(prompt + answer) for prompt, answer in answers]
        head = self.target.get_output_embeddings().weight
        for i, w in enumerate(self.layers):
            inputs, outputs, matrix = [], [], w.block.mlp.down_proj.weight
            for (prompt, answer), of in zip(answers, states):
                known = prompt + answer
                size = len(known) - i - 2
                x = self.run(i, known[i + 1 :][:size], of[:size], 0, Slots())
                inputs.append(w.inside[len(prompt) - 1 :])
                outputs.append((0.5 * head[known[i + 2 :]] - x + w.inside @ matrix.T)[len(prompt) - 1 :])
            inputs, outputs = torch.cat(inputs), torch.cat(outputs)
            square = inputs.T @ inputs + 3e-2 * len(inputs) * torch.eye(inputs.shape[1])
            matrix.copy_(torch.linalg.solve(square, inputs.T @ outputs).T)
            states = [
                w.norm(self.run(i, (prompt + answer)[i + 1 :], of[: len(prompt + answer) - i - 1], 0, Slots()))
                for (prompt, answer), of in zip(answers, states)
            ]
        self.save()

    def save(self):
        weights = load_file(self.folder / "model.safetensors")
        shared = {"shared_head.head.weight": weights["lm_head.weight"], "embed_tokens.weight": weights["model.embed_tokens.weight"]}
        for i, layer in enumerate(self.layers):
            head = f"model.layers.{LAYERS + i}."
            weights.update({name: x.clone() for name, x in [*layer.named(head).items(), *((head + name, x) for name, x in shared.items())]})
        save_file(weights, self.folder / "model.safetensors", metadata=dict(format="pt"))
        config = json.loads((self.folder / "config.json").read_text())
        config.update(num_nextn_predict_layers=self.count, dtype="float32", torch_dtype="float32")
        (self.folder / "config.json").write_text(json.dumps(config, indent=1))

    def draft(self, states):
        return int(self.target.get_output_embeddings()(states[-1]).argmax())

    def several(self, tokens, count):
        """Model runner V2's drafts behind so many of the tokens. Each layer computes the step's positions, and so many of those in front of them that the
        tokens which were drafts the last time are replaced."""
        states, caches, done = self.states(tokens), [Slots() for _ in self.layers], [0]

        def propose(known):
            last = known - 1  # positions whose token behind is known
            first, done[0] = max(0, min(done[0], last - count)), last
            behind, of, found = tokens[first + 1 : known], states[first:last], []
            for i in range(count):
                x = self.run(i % self.count, behind, of, first, caches[i % self.count])
                of = self.layers[i % self.count].norm(x)
                found.append(self.draft(of))
                behind = behind[1:] + found[-1:]
            return found

        return propose

    def first_alone(self, tokens, count):
        """Model runner V1's: the first layer goes on with its own hidden states and drafts, a position further each time."""
        states, cache, done, w = self.states(tokens), Slots(), [0], self.layers[0]

        def propose(known):
            first, last, found = done[0], known - 1, []
            of = w.norm(self.run(0, tokens[first + 1 : known], states[first:last], first, cache))
            for place in range(last, last + count):
                found.append(self.draft(of))
                if len(found) < count:
                    of = w.norm(self.run(0, found[-1:], of[-1:], place, cache))
            done[0] = last
            return found

        return propose
