"""What layers of MTP are to draft, in float32."""

import draft_models as m
import torch
from draft_reference import norm, rotated, tokens_a_step, tokens_a_step_of_trees

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
        self.topk, self.nodes = 1, count + 1

    def cached(self, tokens):
        """The target's last hidden states [tokens, hidden], and keys and values of its last layer of each type."""
        import transformers

        cache = transformers.DynamicCache()
        states = self.target(torch.tensor([tokens]), past_key_values=cache, use_cache=True, output_hidden_states=True).hidden_states[-1][0]
        last = {kind: (cache.layers[i].keys, cache.layers[i].values) for i, kind in enumerate(self.target.config.layer_types)}
        return states, last

    def step(self, state, cached, count, token):
        """What the matrix of logits is given, the assistant's last hidden state, and the logits, of a step behind `count` tokens of the cache."""
        kept = {kind: tuple(x[:, :, :count] for x in kv) for kind, kv in cached.items()}
        x, hidden = torch.cat([self.target.get_input_embeddings()(torch.tensor(token)), state])[None, None], []
        handle = self.assistant.lm_head.register_forward_pre_hook(lambda module, given: hidden.append(given[0]))
        out = self.assistant(inputs_embeds=x, shared_kv_states=kept, position_ids=torch.tensor([[count - 1]]))
        handle.remove()
        return hidden[0][0, -1], out.last_hidden_state[0, -1], out.logits[0, -1]

    def learn(self, answers):
        """Fits the assistant's matrix of logits to the target's answers."""
        inputs, outputs = [], []
        for prompt, answer in answers:
            known = prompt + answer
            states, cached = self.cached(known)
            for at in range(len(prompt), len(known) - self.count - 1, 2):
                state = states[at - 1]
                for token, behind in zip(known[at : at + self.count], known[at + 1 :]):
                    hidden, state, _ = self.step(state, cached, at, token)
                    inputs.append(hidden)
                    outputs.append(behind)
        inputs, outputs = torch.stack(inputs), F.one_hot(torch.tensor(outputs), m.TOKENS).float()
        square = inputs.T @ inputs + 3e-2 * len(inputs) * torch.eye(inputs.shape[1])
        self.assistant.lm_head.weight.data = torch.linalg.solve(square, inputs.T @ outputs).T.contiguous()

    def save(self, folder):
        self.assistant.save_pretrained(folder)
        m.tokenizer().save_pretrained(folder)
        self.assistant.config.text_config.sliding_window -= 1  # in SGLang an assistant sees as many keys as the target does, in transformers one more

    def paths(self, states, cached, count, token):
        """As SGLang's worker drafts: the likeliest top-k nodes of a step go on, and of all the likeliest are verified. A chain with a top-k of 1."""
        found, going_on = {}, [((), 1.0, states[count - 1], token)]
        for _ in range(self.count):
            nodes = []
            for path, mass, state, token in going_on:
                _, state, logits = self.step(state, cached, count, token)
                likeliest = logits.softmax(-1).topk(self.topk)
                nodes += [((*path, int(t)), mass * float(p), state, int(t)) for p, t in zip(*likeliest)]
            found.update((path, mass) for path, mass, _, _ in nodes)
            going_on = sorted(nodes, key=lambda node: node[1])[-self.topk :]
        return sorted(found, key=found.get)[1 - self.nodes :]

    def tokens_a_step(self, prompt, answer):
        states, cached = self.cached(prompt + answer)
        return tokens_a_step_of_trees(lambda known: self.paths(states, cached, len(known) - 1, known[-1]), prompt, answer)
