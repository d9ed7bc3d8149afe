"""What SGLang's mixer calls, as on a CPU: convolutions have no kernel there, and are not even names."""
import torch


def mamba_chunk_scan_combined(*args, **options):
    return "SGLang's prompts"


def selective_state_update(*args, **options):
    return "SGLang's tokens"


class MambaMixer2:
    heads, dim, groups, d_state, use_triton = 4, 32, 2, 16, False

    def __init__(self, device):
        channels = self.heads * self.dim + 2 * self.groups * self.d_state
        self.weight, self.bias = torch.randn(channels, 4, device=device), torch.randn(channels, device=device)
        self.A, (self.D, self.dt_bias) = -0.1 - torch.rand(self.heads, device=device), torch.randn(2, self.heads, device=device)

    def split(self, y):
        x, B, C = y.split([self.heads * self.dim, self.groups * self.d_state, self.groups * self.d_state], -1)
        return x.unflatten(-1, (self.heads, -1)), B.unflatten(-1, (self.groups, -1)), C.unflatten(-1, (self.groups, -1))

    def verify(self, rows, dt, conv_state, ssm_state, indices, kept, windows, own, *tree):
        """A part of SGLang's forward(), for drafts: rows [requests, tokens, channels] and dt [requests, tokens, heads], whose states are kept in rows of others."""
        trees = dict(zip(("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"), tree or [None] * 3))
        places = dict(conv_state_indices=indices, intermediate_conv_window=windows, intermediate_state_indices=own)
        run = globals()["causal_conv1d_update_triton"]
        y = run(rows.transpose(1, 2), conv_state, self.weight, self.bias, "silu", **places, **trees).transpose(1, 2)
        (x, B, C), (count, tokens) = self.split(y), rows.shape[:2]
        out = torch.zeros(count, tokens, self.heads, self.dim, device=rows.device)
        A = self.A[:, None, None].expand(-1, self.dim, self.d_state)
        wide = [z[..., None].expand(*z.shape, self.dim) for z in (dt, self.D, self.dt_bias)]
        selective_state_update(
            ssm_state,
            x,
            wide[0],
            A,
            B,
            C,
            wide[1],
            z=None,
            dt_bias=wide[2],
            dt_softplus=True,
            state_batch_indices=indices,
            out=out,
            disable_state_update=True,
            intermediate_states_buffer=kept,
            cache_steps=tokens,
            retrieve_parent_token=trees["retrieve_parent_token"],
            intermediate_state_indices=own,
        )
        return out

    def forward(self, rows, dt, conv_state, ssm_state, indices, starts, earlier, *drafts, track=None):
        if drafts:
            return self.verify(rows, dt, conv_state, ssm_state, indices, *drafts)
        out = torch.zeros(len(rows), self.heads, self.dim, device=rows.device)
        if starts is not None:
            run = globals()["causal_conv1d_fn_triton" if self.use_triton else "causal_conv1d_fn"]
            y = run(
                rows.transpose(0, 1),
                self.weight,
                self.bias,
                activation="silu",
                conv_states=conv_state,
                has_initial_state=earlier,
                cache_indices=indices,
                query_start_loc=starts,
                seq_lens_cpu=starts.diff().tolist(),
            ).transpose(0, 1)
            x, B, C = self.split(y)
            initial = torch.where(earlier[:, None, None, None], ssm_state[indices], 0) if earlier.any() else None
            between, states, tracked = mamba_chunk_scan_combined(
                x[None],
                dt[None],
                self.A,
                B[None],
                C[None],
                chunk_size=8,
                D=self.D,
                z=None,
                dt_bias=self.dt_bias,
                seq_idx=None,
                chunk_indices=None,
                chunk_offsets=None,
                cu_seqlens=starts,
                initial_states=initial,
                return_varlen_states=True,
                return_final_states=False,
                return_track_states=True,
                track_seq_idx=track,
                track_end_locs=None,
                dt_softplus=True,
                dt_limit=(0.0, float("inf")),
                out=out[None],
                state_dtype=ssm_state.dtype,
            )
            assert between is None and tracked is None
            ssm_state[indices] = states
            return out
        run = globals()["causal_conv1d_update_triton" if self.use_triton else "causal_conv1d_update"]
        x, B, C = self.split(run(rows, conv_state, self.weight, self.bias, "silu", conv_state_indices=indices))
        A = self.A[:, None, None].expand(-1, self.dim, self.d_state)
        wide = [y[..., None].expand(*y.shape, self.dim) for y in (dt, self.D, self.dt_bias)]
        selective_state_update(
            ssm_state, x, wide[0], A, B, C, wide[1], z=None, dt_bias=wide[2], dt_softplus=True, state_batch_indices=indices, out=out
        )
        return out
