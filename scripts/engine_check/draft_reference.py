"""What drafts of blocks (DFLASH, DSPARK) are to be, in PyTorch in float32: no cache, and a mask of all keys."""

import torch

import draft_models as m

F = torch.nn.functional


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x, positions):
    """x [tokens, heads, dim], turned by its positions, halves of dim together."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / 10000.0 ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Blocks:
    def __init__(self, target, config, weights, recent=0, page_size=1):
        """recent: how many of the committed tokens drafts see, from the beginning of a page on (--speculative-draft-window-size); 0: all."""
        self.target, self.config, self.weights, self.recent, self.page_size = target, config, weights, recent, page_size

    def features(self, tokens):
        """[tokens, hidden] of the target's hidden states, of which layers of the draft make keys and values."""
        states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        taken = torch.cat([states[i + 1][0] for i in m.TAKEN], -1)
        return norm(taken @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])

    def heads(self, layer, name, x):
        return (x @ self.weights[f"layers.{layer}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, self.config["head_dim"]))

    def attention(self, layer, x, context, positions):
        head = f"layers.{layer}.self_attn."
        q, k = (
            norm(self.heads(layer, name, of), self.weights[f"{head}{name}_norm.weight"]) for name, of in (("q", x), ("k", torch.cat([context, x])))
        )
        v = self.heads(layer, "v", torch.cat([context, x]))
        q, k = rotated(q, positions), rotated(k, torch.arange(len(k)))
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if self.config["layer_types"][layer] == "sliding_attention":
            ahead = torch.arange(len(k)) - positions[:, None]
            seen = (ahead <= 0) & (ahead > -self.config["sliding_window"])
        if self.recent:
            first = max(0, len(context) - self.recent)
            seen[:, : first - first % self.page_size] = False
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(0, 1).flatten(1) @ self.weights[f"{head}o_proj.weight"].T

    def block(self, context, token, width):
        """The draft's last layer for a token behind the context and masks behind that: [width, hidden] in front of its MLP's last matrix, and what that makes."""
        positions = torch.arange(len(context), len(context) + width)
        x = self.target.get_input_embeddings()(torch.tensor([token] + [m.MASK] * (width - 1)))
        for i in range(self.config["num_hidden_layers"]):
            w = {name.split(".", 2)[2]: value for name, value in self.weights.items() if name.startswith(f"layers.{i}.")}
            residual = x + self.attention(i, norm(x, w["input_layernorm.weight"]), context, positions)
            y = norm(residual, w["post_attention_layernorm.weight"])
            y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
            x = residual + y @ w["mlp.down_proj.weight"].T
        return residual, y, x

    def learn(self, answers):
        """Fits the last matrix to the target's answers, so that some drafts are right. answers: of each prompt, its tokens and those behind it."""
        name, size, ahead = f"layers.{self.config['num_hidden_layers'] - 1}.mlp.down_proj.weight", self.config["block_size"], self.ahead
        inputs, outputs = [], []
        for prompt, answer in answers:
            known, context = prompt + answer, self.features(prompt + answer)
            for at in range(len(prompt), len(known) - size - ahead, 2):
                residual, y, _ = self.block(context[:at], known[at], size)
                wanted = 0.5 * self.target.get_output_embeddings().weight[known[at + 1 : at + 1 + size - ahead]]
                inputs.append(y[ahead:])
                outputs.append(wanted - residual[ahead:])
        inputs, outputs = torch.cat(inputs), torch.cat(outputs)
        square = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(inputs.shape[1])
        self.weights[name] = torch.linalg.solve(square, inputs.T @ outputs).T.contiguous()

    def save(self, folder):
        m.save(folder, self.config, self.weights)

    @property
    def ahead(self):
        """The first draft is of the last token itself (DSPARK), or of the mask behind it."""
        return 0 if self.config.get("markov_rank") else 1

    def drafts(self, context, token):
        x = self.block(context, token, self.config["block_size"])[2][self.ahead :]
        logits = self.target.get_output_embeddings()(norm(x, self.weights["norm.weight"]))
        if not self.config.get("markov_rank"):
            return logits.argmax(-1).tolist()
        found = [token]
        for step in logits:
            bias = self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][found[-1]]
            found.append(int((step + bias).argmax()))
        return found[1:]

    def tokens_a_step(self, prompt, answer):
        context = self.features(prompt + answer)
        return tokens_a_step(lambda known: self.drafts(context[: len(known) - 1], known[-1]), prompt, answer)


def tokens_a_step(drafts_of, prompt, answer):
    """How many tokens a step makes of the answer on average, where drafts_of(tokens) drafts those behind; the prompt's own step makes the first."""
    known, count, rounds = prompt + answer, len(prompt) + 1, 0
    while count < len(known):
        kept = 0
        for draft in drafts_of(known[:count]):
            if count + kept < len(known) and draft != known[count + kept]:
                break
            kept += 1
        count, rounds = count + kept + 1, rounds + 1
    return len(answer) / rounds


def tokens_a_step_of_trees(paths_of, prompt, answer, certain=0):
    """The same where paths_of(tokens) drafts a tree, of which it gives every node by the tokens to it. certain: so many tokens of a step come before the tree."""
    whole, wrong = prompt + answer, -1

    def drafts(known):
        first, behind = whole[len(known) :][:certain], whole[len(known) + certain :]
        kept = max((len(path) for path in paths_of(known) if list(path) == behind[: len(path)]), default=0)
        return [*first, *behind[:kept], wrong]

    return tokens_a_step(drafts, prompt, answer)
