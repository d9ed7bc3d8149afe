"""What layers of MTP are to draft, in float32."""

import draft_models as m
import torch
from draft_reference import norm, rotated, tokens_a_step

F = torch.nn.functional


class Mtp:
    """Several layers with caches of their own, as SGLang's worker runs them: in the cache of the layers behind the first keys and values of drafts stay, in the
    place of those of the tokens that came to be there."""

    def __init__(self, target, config, weights):
        self.target, self.config, self.count = target, config, config["num_nextn_predict_layers"]
        heads = [f"model.mtp.layers.{i}." for i in range(self.count)]
        self.weights = weights
        self.layers = [{name[len(head) :]: x for name, x in weights.items() if name.startswith(head)} for head in heads]

    def states(self, tokens):
        """[tokens, hidden] of the target's last hidden states."""
        return self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]

    def layer(self, w, tokens, states, first, cache):
        """One layer for tokens behind those that have these states, at positions first and on. cache: its keys and values, [positions, heads, dim], which it
        writes. Returns hidden states in front of the MLP's last matrix, and what that multiplies."""
        embedded = norm(self.target.get_input_embeddings()(torch.tensor(tokens)), w["enorm.weight"])
        x = torch.cat([embedded, norm(states, w["hnorm.weight"])], -1) @ w["eh_proj.weight"].T
        y, positions = norm(x, w["input_layernorm.weight"]), torch.arange(first, first + len(tokens))
        kv_heads, last = self.config["num_key_value_heads"], first + len(tokens)
        q, k, v = (y @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        q = rotated(q.unflatten(-1, (self.config["num_attention_heads"], -1)), positions)
        cache[0][first:last] = rotated(k.unflatten(-1, (kv_heads, -1)), positions)
        cache[1][first:last] = v.unflatten(-1, (kv_heads, -1))
        k, v = (x[:last].repeat_interleave(q.shape[1] // kv_heads, 1) for x in cache)
        ahead = torch.arange(last) - positions[:, None]
        logits = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
        logits = logits.masked_fill((ahead > 0) | (ahead < -self.config["sliding_window_size"]), float("-inf"))
        sinks = w["self_attn.attention_sink_bias"][:, None, None].expand(-1, len(tokens), 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        x = x + torch.einsum("hnm,mhd->nhd", weights, v).flatten(1) @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        return x, F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)

    def caches(self, room):
        heads, dim, v_dim = (self.config[name] for name in ("num_key_value_heads", "head_dim", "v_head_dim"))
        return [(torch.zeros(room, heads, dim), torch.zeros(room, heads, v_dim)) for _ in self.layers]

    def learn(self, answers):
        """Fits each layer's last matrix to the target's answers."""
        for i, w in enumerate(self.layers):
            inputs, outputs = [], []
            for prompt, answer in answers:
                known = prompt + answer
                count = len(known) - i - 2
                states = self.states(known)[:count]
                x, y = self.layer(w, known[i + 1 :][:count], states, 0, self.caches(count)[i])
                inputs.append(y[len(prompt) - 1 :])
                outputs.append((0.5 * self.target.get_output_embeddings().weight[known[i + 2 :]] - x)[len(prompt) - 1 :])
            inputs, outputs = torch.cat(inputs), torch.cat(outputs)
            square = inputs.T @ inputs + 3e-2 * len(inputs) * torch.eye(inputs.shape[1])
            w["mlp.down_proj.weight"] = torch.linalg.solve(square, inputs.T @ outputs).T.contiguous()
            self.weights[f"model.mtp.layers.{i}.mlp.down_proj.weight"] = w["mlp.down_proj.weight"]

    def save(self, folder):
        m.save(folder, self.config, self.weights)

    def tokens_a_step(self, prompt, answer):
        states, caches, done = self.states(prompt + answer), self.caches(len(prompt + answer)), [0]

        def drafts(known):
            """Of tokens behind the last; the positions since the call before have their true tokens, but behind the first layer not in the last places."""
            first, last = done[0], len(known) - 1
            tokens, found = known[first + 1 :], []
            for w, cache in zip(self.layers, caches):
                x, y = self.layer(w, tokens, states[first:last], first, cache)
                x = norm(x[-1] + w["mlp.down_proj.weight"] @ y[-1], w["final_layernorm.weight"])
                found.append(int(self.target.get_output_embeddings()(x).argmax()))
                tokens = tokens[1:] + found[-1:]
            done[0] = last
            return found

        return tokens_a_step(drafts, prompt, answer)


class Frozen:
    """An assistant over the target's own cache, in transformers: each of its steps is at the position of the cache's last token."""

    def __init__(self, target, assistant, count):
        self.target, self.assistant, self.count = target, assistant, count

    def cached(self, tokens):
        """The target's last hidden states [tokens, hidden], and keys and values of its last layer of each type."""
        import transformers

        cache = transformers.DynamicCache()
        states = self.target(torch.tensor([tokens]), past_key_values=cache, use_cache=True, output_hidden_states=True).hidden_states[-1][0]
        last = {kind: (cache.layers[i].keys, cache.layers[i].values) for i, kind in enumerate(self.target.config.layer_types)}
        return states, last

    def steps(self, states, cached, count, token, true=None):
        """The assistant's last hidden states and the logits of its steps behind `count` tokens of the cache; true: what it is to go on with instead of its drafts."""
        state, kept = states[count - 1], {kind: tuple(x[:, :, :count] for x in kv) for kind, kv in cached.items()}
        for i in range(self.count):
            x = torch.cat([self.target.get_input_embeddings()(torch.tensor(token)), state])[None, None]
            hidden = []
            handle = self.assistant.lm_head.register_forward_pre_hook(lambda module, given: hidden.append(given[0]))
            out = self.assistant(inputs_embeds=x, shared_kv_states=kept, position_ids=torch.tensor([[count - 1]]))
            handle.remove()
            state, token = out.last_hidden_state[0, -1], int(out.logits[0, -1].argmax()) if true is None else true[i]
            yield hidden[0][0, -1], token

    def learn(self, answers):
        """Fits the assistant's matrix of logits to the target's answers."""
        inputs, outputs = [], []
        for prompt, answer in answers:
            known = prompt + answer
            states, cached = self.cached(known)
            for at in range(len(prompt), len(known) - self.count - 1, 2):
                true = known[at + 1 : at + 1 + self.count]
                inputs += [hidden for hidden, _ in self.steps(states, cached, at, known[at], true)]
                outputs += true
        inputs, outputs = torch.stack(inputs), F.one_hot(torch.tensor(outputs), m.TOKENS).float()
        square = inputs.T @ inputs + 3e-2 * len(inputs) * torch.eye(inputs.shape[1])
        self.assistant.lm_head.weight.data = torch.linalg.solve(square, inputs.T @ outputs).T.contiguous()

    def save(self, folder):
        self.assistant.save_pretrained(folder)
        m.tokenizer().save_pretrained(folder)
        self.assistant.config.text_config.sliding_window -= 1  # in SGLang an assistant sees as many keys as the target does, in transformers one more

    def tokens_a_step(self, prompt, answer):
        states, cached = self.cached(prompt + answer)
        return tokens_a_step(lambda known: [token for _, token in self.steps(states, cached, len(known) - 1, known[-1])], prompt, answer)
