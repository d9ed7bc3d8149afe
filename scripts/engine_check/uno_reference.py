"""What UNO is to draft: a target reads noise behind its tokens, and an adapter (LoRA) makes tokens of what it says there."""

import json

import draft_models as m
import torch
from draft_reference import tokens_a_step_of_trees
from safetensors.torch import save_file
from sglang_on_a_cpu import noise

RANK = 32
PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + ("mlp.down_proj",)


class Uno:
    """A target with an adapter of all its layers, which only the rows of noise go through. width: tokens of a step, the last of them `width - 1` of noise."""

    def __init__(self, target, width):
        self.target, self.width, self.active = target, width, False
        self.topk, self.nodes = 1, width
        random, self.adapter = m.Random(11), {}
        for index, layer in enumerate(target.model.layers):
            for name in PROJECTIONS:
                linear = layer.get_submodule(name)
                weights = [random(RANK, linear.in_features), random(linear.out_features, RANK, scale=0.2)]
                self.adapter[f"model.layers.{index}.{name}"] = weights
                linear.register_forward_hook(lambda module, given, out, weights=weights: self._adapted(given[0], out, weights))

    def _adapted(self, given, out, weights):
        if self.active:
            a, b = weights
            out[:, 1 - self.width :] += given[:, 1 - self.width :] @ a.T @ b.T
        return out

    def read(self, known):
        """The target's logits [width, tokens] of the last of the known tokens and of the noise behind it, and what its last layer's last matrix was given of the noise."""
        seen, last = [], self.target.model.layers[-1].mlp.down_proj
        tokens = known + noise(torch.tensor(known[-1:]), self.width - 1, m.TOKENS)[0].tolist()
        handle = last.register_forward_hook(lambda module, given, out: seen.append(given[0][0, 1 - self.width :]))
        self.active = True
        try:
            out = self.target(torch.tensor([tokens]))
        finally:
            self.active = False
            handle.remove()
        return out.logits[0, -self.width :], seen[0]

    def learn(self, answers):
        """Fits the adapter's last product to the first of the target's answers, those to the check's prompts among them: of more it has too few numbers."""
        name = f"model.layers.{len(self.target.model.layers) - 1}.mlp.down_proj"
        adapter, layer = self.adapter[name], self.target.model.layers[-1]
        adapter[1].zero_()
        inputs, outputs, made = [], [], []
        handle = layer.register_forward_hook(lambda module, given, out: made.append((out[0] if isinstance(out, tuple) else out)[0, 1 - self.width :]))
        for prompt, answer in answers[:10]:
            known = prompt + answer
            for at in range(len(prompt), len(known) - self.width):
                inputs.append(self.read(known[: at + 1])[1])
                wanted = known[at + 2 : at + 1 + self.width]
                outputs.append(0.5 * self.target.get_output_embeddings().weight[wanted] - made.pop())
        handle.remove()
        inputs, outputs = torch.cat(inputs), torch.cat(outputs)
        square = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(inputs.shape[1])
        heads = self.target.get_output_embeddings().weight * self.target.model.norm.weight
        seen = torch.linalg.qr(heads.T)[0]  # what the matrix of logits sees of hidden states has a small rank
        u, s, v = torch.linalg.svd(seen @ (seen.T @ torch.linalg.solve(square, inputs.T @ outputs).T), full_matrices=False)
        adapter[0].copy_(v[:RANK])
        adapter[1].copy_(u[:, :RANK] * s[:RANK])

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        modules = [name.split(".")[1] for name in PROJECTIONS]
        (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=RANK, lora_alpha=RANK, target_modules=modules, bias="none")))
        parts = {f"base_model.model.{name}.lora_{part}.weight": x for name, weights in self.adapter.items() for part, x in zip("AB", weights)}
        save_file({name: x.contiguous() for name, x in parts.items()}, folder / "adapter_model.safetensors", metadata=dict(format="pt"))

    def paths(self, known):
        """The likeliest nodes of a tree behind the token that is certain. A chain with a top-k of 1."""
        ranked = self.read(known)[0][1:].log_softmax(-1).topk(self.topk)
        nodes, around = [()], {}
        while len(nodes) < self.nodes:
            node = nodes[-1]
            for rank in range(self.topk if len(node) < len(ranked.values) else 0):
                around[(*node, rank)] = sum(float(ranked.values[depth, r]) for depth, r in enumerate((*node, rank)))
            nodes.append(max(around, key=around.get))
            del around[nodes[-1]]
        return [tuple(int(ranked.indices[depth, rank]) for depth, rank in enumerate(node)) for node in nodes]

    def tokens_a_step(self, prompt, answer):
        return tokens_a_step_of_trees(self.paths, prompt, answer, certain=1)
