"""The public ops: their signatures and meaning. `dispatch` validates a call, chooses an implementation and runs it."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jfla import dispatch
from jfla.gates import Gate
from jfla.types import GDN, KDA, AxisName, DeltaRuleOutput, Implementation


def chunk_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    gate: Gate | None = None,
    beta_max: float | None = None,
    qk_norm: bool = False,
    scale: float | None = None,
    initial_state: Float[Array, "B *S HV K V"] | None = None,
    return_final_state: bool = False,
    return_states_every: int | None = None,
    state_dtype: DTypeLike | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
    sequence_axis: AxisName | None = None,
) -> DeltaRuleOutput:
    """Kimi Delta Attention, in chunks: training and prefill.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T          o_t = S_t^T (scale q_t)

    Every key channel decays on its own. Sequences are cut in chunks of 64 tokens; time and memory are linear in T.

    **Arguments:**

    - `q`, `k`: `[B, T, H, K]`, float32, bfloat16 or float16 (float64 with "xla").
    - `v`: `[B, T, HV, V]`, HV a multiple of H; value head hv reads query and key head `hv // (HV / H)`.
    - `g`: `[B, T, HV, K]`, natural-log decay per token, <= 0; the raw gate input when `gate` is given.
    - `beta`: `[B, T, HV]`, the strength of a write; logits when `beta_max` is given.
    - `gate`: None, `SoftplusGate(a_log, dt_bias)` or `SigmoidGate(a_log, dt_bias, lower_bound)`, applied to `g`.
    - `beta_max`: None takes `beta` as given; 1.0 is `sigmoid(beta)`; 2.0 is `2 sigmoid(beta)`, which allows negative
      eigenvalues.
    - `qk_norm`: l2-normalises q and k over K, `x * rsqrt(sum(x^2) + 1e-6)`.
    - `scale`: multiplies q; `K ** -0.5` by default.
    - `initial_state`: `[B, HV, K, V]` float32 or bfloat16, or `[B, S, HV, K, V]` with segments; zero by default.
    - `return_final_state`: whether the state after the last token comes back.
    - `return_states_every`: n, a multiple of 64. The final state is then `[B, ceil(T / n), HV, K, V]`, the states after
      n, 2n, .. and T tokens: a later call that begins from one of them goes on as this one did. Not with `segment_ids`.
    - `state_dtype`: float32 or bfloat16, the dtype of the final state; by default that of `initial_state`, or float32.
      Between a call's tokens the state is float32 whatever it comes and goes as.
    - `segment_ids`: `[B, T]` integers in 1 .. S, not decreasing along T, 0 for padding at the end: sequences packed one
      behind the other that do not see each other. An id that does not occur is an empty sequence: its final state is
      its initial state.
    - `num_segments`: S, static; taken from `initial_state` when that is given, needed to return final states.
    - `implementation`: None chooses (see `jfla.explain`); "pallas" and "xla" are taken as named and never fall back.
    - `sequence_axis`: a mesh axis, inside `jax.shard_map`: the arrays are then this device's stretch of time, in the
      order of the axis, and the result is that of the whole sequence, exact for every gate. `segment_ids` are numbered
      over all devices: a segment may begin, go through several devices or end anywhere. `initial_state` is read on the
      first device; `final_state` is the same on all.

    **Returns:** `DeltaRuleOutput(output, final_state)`: `output` `[B, T, HV, V]` in the dtype of `v`; `final_state`
    like `initial_state`, in `state_dtype`, or None unless asked for. Both are differentiable in every float argument,
    and gradients come back in the dtype of their argument; padding has output and gradients of exactly 0.

    **Rounding:** "xla" computes in float32 (float64 if an input is float64), with matmuls at
    `jax.default_matmul_precision`; where that is not set, at "high" for 16-bit q, k and v, else "highest". "pallas"
    multiplies bfloat16, or float16 if q, k and v are (but pairs of different tokens within 64, in bfloat16), and
    accumulates in float32; the gates' sums, the state between chunks and what a gradient is summed from are float32.

    **Raises:** `ValueError` naming the argument, what was expected and what came; `NotImplementedError` with the reason
    when the implementation asked for by name cannot take the call.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).

    >>> import jax, jfla
    >>> q, k, v, g = jax.random.normal(jax.random.key(0), (4, 1, 100, 2, 16))
    >>> beta = jax.random.normal(jax.random.key(1), (1, 100, 2))
    >>> out = jfla.chunk_kda(q, k, v, -g * g, beta, beta_max=1.0, qk_norm=True, return_final_state=True)
    >>> print(out.output.shape, out.final_state.shape)
    (1, 100, 2, 16) (1, 2, 16, 16)
    """
    return dispatch.run(
        KDA,
        "chunk",
        *(q, k, v, g, beta),
        gate=gate,
        beta_max=beta_max,
        qk_norm=qk_norm,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        return_states_every=return_states_every,
        state_dtype=state_dtype,
        segment_ids=segment_ids,
        num_segments=num_segments,
        implementation=implementation,
        sequence_axis=sequence_axis,
    )


def chunk_gdn(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    gate: Gate | None = None,
    beta_max: float | None = None,
    qk_norm: bool = False,
    scale: float | None = None,
    initial_state: Float[Array, "B *S HV K V"] | None = None,
    return_final_state: bool = False,
    return_states_every: int | None = None,
    state_dtype: DTypeLike | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
    sequence_axis: AxisName | None = None,
) -> DeltaRuleOutput:
    """Gated DeltaNet, in chunks: training and prefill.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T          o_t = S_t^T (scale q_t)

    The whole state of a head decays together. Sequences are cut in chunks of 64 tokens; time and memory grow linearly.

    **Arguments:**

    - `q`, `k`: `[B, T, H, K]`, float32, bfloat16 or float16 (float64 with "xla").
    - `v`: `[B, T, HV, V]`, HV a multiple of H; value head hv reads query and key head `hv // (HV / H)`.
    - `g`: `[B, T, HV]`, natural-log decay per token, <= 0; the raw gate input when `gate` is given.
    - `beta`: `[B, T, HV]`, the strength of a write; logits when `beta_max` is given.
    - `gate`: None, `SoftplusGate(a_log, dt_bias)` or `SigmoidGate(a_log, dt_bias, lower_bound)`, applied to `g`.
    - `beta_max`: None takes `beta` as given; 1.0 is `sigmoid(beta)`; 2.0 is `2 sigmoid(beta)`, which allows negative
      eigenvalues.
    - `qk_norm`: l2-normalises q and k over K, `x * rsqrt(sum(x^2) + 1e-6)`.
    - `scale`: multiplies q; `K ** -0.5` by default.
    - `initial_state`: `[B, HV, K, V]` float32 or bfloat16, or `[B, S, HV, K, V]` with segments; zero by default.
    - `return_final_state`: whether the state after the last token comes back.
    - `return_states_every`: n, a multiple of 64. The final state is then `[B, ceil(T / n), HV, K, V]`, the states after
      n, 2n, .. and T tokens: a later call that begins from one of them goes on as this one did. Not with `segment_ids`.
    - `state_dtype`: float32 or bfloat16, the dtype of the final state; by default that of `initial_state`, or float32.
      Between a call's tokens the state is float32 whatever it comes and goes as.
    - `segment_ids`: `[B, T]` integers in 1 .. S, not decreasing along T, 0 for padding at the end: sequences packed one
      behind the other that do not see each other. An id that does not occur is an empty sequence: its final state is
      its initial state.
    - `num_segments`: S, static; taken from `initial_state` when that is given, needed to return final states.
    - `implementation`: None chooses (see `jfla.explain`); "pallas" and "xla" are taken as named and never fall back.
    - `sequence_axis`: a mesh axis, inside `jax.shard_map`: the arrays are then this device's stretch of time, in the
      order of the axis, and the result is that of the whole sequence, exact for every gate. `segment_ids` are numbered
      over all devices: a segment may begin, go through several devices or end anywhere. `initial_state` is read on the
      first device; `final_state` is the same on all.

    **Returns:** `DeltaRuleOutput(output, final_state)`: `output` `[B, T, HV, V]` in the dtype of `v`; `final_state`
    like `initial_state`, in `state_dtype`, or None unless asked for. Both are differentiable in every float argument,
    and gradients come back in the dtype of their argument; padding has output and gradients of exactly 0.

    **Rounding:** "xla" computes in float32 (float64 if an input is float64), with matmuls at
    `jax.default_matmul_precision`; where that is not set, at "high" for 16-bit q, k and v, else "highest". "pallas"
    multiplies bfloat16, or float16 if q, k and v are, and accumulates in float32; the gates' sums, the state between
    chunks and what a gradient is summed from are float32.

    **Raises:** `ValueError` naming the argument, what was expected and what came; `NotImplementedError` with the reason
    when the implementation asked for by name cannot take the call.

    Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv:2412.06464).

    >>> import jax, jfla
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 100, 2, 16))
    >>> g, beta = jax.random.normal(jax.random.key(1), (2, 1, 100, 2))
    >>> gate = jfla.SoftplusGate(a_log=jax.numpy.zeros(2))
    >>> jfla.chunk_gdn(q, k, v, g, beta, gate=gate, beta_max=1.0, qk_norm=True).output.shape
    (1, 100, 2, 16)
    """
    return dispatch.run(
        GDN,
        "chunk",
        *(q, k, v, g, beta),
        gate=gate,
        beta_max=beta_max,
        qk_norm=qk_norm,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        return_states_every=return_states_every,
        state_dtype=state_dtype,
        segment_ids=segment_ids,
        num_segments=num_segments,
        implementation=implementation,
        sequence_axis=sequence_axis,
    )


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    gate: Gate | None = None,
    beta_max: float | None = None,
    qk_norm: bool = False,
    scale: float | None = None,
    initial_state: Float[Array, "B_or_P *S HV K V"] | None = None,
    return_final_state: bool = False,
    state_dtype: DTypeLike | None = None,
    return_states: bool = False,
    state_slots: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> DeltaRuleOutput:
    """Kimi Delta Attention, token by token: decoding (T = 1 and up) and small T. See `chunk_kda`.

        S <- exp(g_t)[:, None] S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T (scale q_t)

    "pallas" is one kernel for up to 8 tokens, and a launch for every 8 of a longer call: float32 throughout, where
    `chunk_*` rounds to bfloat16 and is faster from about 100 tokens on. Donate `initial_state` (`donate_argnames` of
    `jax.jit`), or carry it through a `lax.scan`, and the state is written in place. Derivatives are those of "xla".

    **Arguments:**

    - `q`, `k`: `[B, T, H, K]`, float32, bfloat16 or float16 (float64 with "xla").
    - `v`: `[B, T, HV, V]`, HV a multiple of H; value head hv reads query and key head `hv // (HV / H)`.
    - `g`: `[B, T, HV, K]`, natural-log decay per token, <= 0; the raw gate input when `gate` is given.
    - `beta`: `[B, T, HV]`, the strength of a write; logits when `beta_max` is given.
    - `gate`: None, `SoftplusGate(a_log, dt_bias)` or `SigmoidGate(a_log, dt_bias, lower_bound)`, applied to `g`.
    - `beta_max`: None takes `beta` as given; 1.0 is `sigmoid(beta)`; 2.0 is `2 sigmoid(beta)`, which allows negative
      eigenvalues.
    - `qk_norm`: l2-normalises q and k over K, `x * rsqrt(sum(x^2) + 1e-6)`.
    - `scale`: multiplies q; `K ** -0.5` by default.
    - `initial_state`: `[B, HV, K, V]` float32 or bfloat16, or `[B, S, HV, K, V]` with segments; zero by default.
    - `return_final_state`: whether the state after the last token comes back.
    - `state_dtype`: float32 or bfloat16, the dtype of the final state; by default that of `initial_state`, or float32.
      Between a call's tokens the state is float32 whatever it comes and goes as.
    - `return_states`: `final_state` is then the state after every token, `[B, T, HV, K, V]`, whatever
      `return_final_state` says. `final_state[:, n - 1]` is the state after n tokens: where n of T drafted tokens are
      accepted, decoding goes on from there. The initial state is not written over. Not with `segment_ids` but those of
      a pool.
    - `state_slots`: `[B]` integers. `initial_state` is then a pool `[P, HV, K, V]`: row b reads slot `state_slots[b]`,
      and the final state is the pool with that slot written, each named at most once and the others as they were. -1
      is an idle row, with an output of 0 and nothing written; so is what is no slot, where only a compiled call could
      know. `segment_ids` is 1 on a row's tokens, 0 on the padding behind them, if rows have different numbers of
      tokens. With `return_states` nothing is written: `jfla.accept` puts the accepted states back.
    - `segment_ids`: `[B, T]` integers in 1 .. S, not decreasing along T, 0 for padding at the end: sequences packed one
      behind the other that do not see each other. An id that does not occur is an empty sequence: its final state is
      its initial state.
    - `num_segments`: S, static; taken from `initial_state` when that is given, needed to return final states.
    - `implementation`: None chooses (see `jfla.explain`); "pallas" and "xla" are taken as named and never fall back.

    **Returns:** `DeltaRuleOutput(output, final_state)`: `output` `[B, T, HV, V]` in the dtype of `v`; `final_state`
    like `initial_state`, in `state_dtype`, or None unless asked for. Both are differentiable in every float argument,
    and gradients come back in the dtype of their argument; padding has output and gradients of exactly 0.

    **Rounding:** "xla" computes in float32 (float64 if an input is float64), and so does "pallas", with the GPU's
    approximate exponential; only the output is rounded, to the dtype of `v`.

    **Raises:** `ValueError` naming the argument, what was expected and what came; `NotImplementedError` with the reason
    when the implementation asked for by name cannot take the call.

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).

    >>> import jax, jfla
    >>> q, k, v, g = jax.random.normal(jax.random.key(0), (4, 1, 1, 2, 16))
    >>> beta, state = jax.numpy.ones((1, 1, 2)), jax.numpy.zeros((1, 2, 16, 16))
    >>> out = jfla.recurrent_kda(q, k, v, -g * g, beta, qk_norm=True, initial_state=state, return_final_state=True)
    >>> print(out.output.shape, out.final_state.shape)
    (1, 1, 2, 16) (1, 2, 16, 16)
    """
    return dispatch.run(
        KDA,
        "recurrent",
        *(q, k, v, g, beta),
        gate=gate,
        beta_max=beta_max,
        qk_norm=qk_norm,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        state_dtype=state_dtype,
        return_states=return_states,
        state_slots=state_slots,
        segment_ids=segment_ids,
        num_segments=num_segments,
        implementation=implementation,
    )


def recurrent_gdn(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    gate: Gate | None = None,
    beta_max: float | None = None,
    qk_norm: bool = False,
    scale: float | None = None,
    initial_state: Float[Array, "B_or_P *S HV K V"] | None = None,
    return_final_state: bool = False,
    state_dtype: DTypeLike | None = None,
    return_states: bool = False,
    state_slots: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> DeltaRuleOutput:
    """Gated DeltaNet, token by token: decoding (T = 1 and up) and small T. See `chunk_gdn`.

        S <- exp(g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T (scale q_t)

    "pallas" is one kernel for up to 8 tokens, and a launch for every 8 of a longer call: float32 throughout, where
    `chunk_*` rounds to bfloat16 and is faster from about 100 tokens on. Donate `initial_state` (`donate_argnames` of
    `jax.jit`), or carry it through a `lax.scan`, and the state is written in place. Derivatives are those of "xla".

    **Arguments:**

    - `q`, `k`: `[B, T, H, K]`, float32, bfloat16 or float16 (float64 with "xla").
    - `v`: `[B, T, HV, V]`, HV a multiple of H; value head hv reads query and key head `hv // (HV / H)`.
    - `g`: `[B, T, HV]`, natural-log decay per token, <= 0; the raw gate input when `gate` is given.
    - `beta`: `[B, T, HV]`, the strength of a write; logits when `beta_max` is given.
    - `gate`: None, `SoftplusGate(a_log, dt_bias)` or `SigmoidGate(a_log, dt_bias, lower_bound)`, applied to `g`.
    - `beta_max`: None takes `beta` as given; 1.0 is `sigmoid(beta)`; 2.0 is `2 sigmoid(beta)`, which allows negative
      eigenvalues.
    - `qk_norm`: l2-normalises q and k over K, `x * rsqrt(sum(x^2) + 1e-6)`.
    - `scale`: multiplies q; `K ** -0.5` by default.
    - `initial_state`: `[B, HV, K, V]` float32 or bfloat16, or `[B, S, HV, K, V]` with segments; zero by default.
    - `return_final_state`: whether the state after the last token comes back.
    - `state_dtype`: float32 or bfloat16, the dtype of the final state; by default that of `initial_state`, or float32.
      Between a call's tokens the state is float32 whatever it comes and goes as.
    - `return_states`: `final_state` is then the state after every token, `[B, T, HV, K, V]`, whatever
      `return_final_state` says. `final_state[:, n - 1]` is the state after n tokens: where n of T drafted tokens are
      accepted, decoding goes on from there. The initial state is not written over. Not with `segment_ids` but those of
      a pool.
    - `state_slots`: `[B]` integers. `initial_state` is then a pool `[P, HV, K, V]`: row b reads slot `state_slots[b]`,
      and the final state is the pool with that slot written, each named at most once and the others as they were. -1
      is an idle row, with an output of 0 and nothing written; so is what is no slot, where only a compiled call could
      know. `segment_ids` is 1 on a row's tokens, 0 on the padding behind them, if rows have different numbers of
      tokens. With `return_states` nothing is written: `jfla.accept` puts the accepted states back.
    - `segment_ids`: `[B, T]` integers in 1 .. S, not decreasing along T, 0 for padding at the end: sequences packed one
      behind the other that do not see each other. An id that does not occur is an empty sequence: its final state is
      its initial state.
    - `num_segments`: S, static; taken from `initial_state` when that is given, needed to return final states.
    - `implementation`: None chooses (see `jfla.explain`); "pallas" and "xla" are taken as named and never fall back.

    **Returns:** `DeltaRuleOutput(output, final_state)`: `output` `[B, T, HV, V]` in the dtype of `v`; `final_state`
    like `initial_state`, in `state_dtype`, or None unless asked for. Both are differentiable in every float argument,
    and gradients come back in the dtype of their argument; padding has output and gradients of exactly 0.

    **Rounding:** "xla" computes in float32 (float64 if an input is float64), and so does "pallas", with the GPU's
    approximate exponential; only the output is rounded, to the dtype of `v`.

    **Raises:** `ValueError` naming the argument, what was expected and what came; `NotImplementedError` with the reason
    when the implementation asked for by name cannot take the call.

    Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv:2412.06464).

    >>> import jax, jfla
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 5, 2, 16))  # 4 sequences, 5 drafted tokens
    >>> g, beta = -jax.numpy.ones((4, 5, 2)), jax.numpy.ones((4, 5, 2))
    >>> output, states = jfla.recurrent_gdn(q, k, v, g, beta, qk_norm=True, return_states=True)
    >>> accepted = jax.numpy.array([5, 1, 3, 2])
    >>> state = states[jax.numpy.arange(4), accepted - 1]
    >>> print(output.shape, states.shape, state.shape)
    (4, 5, 2, 16) (4, 5, 2, 16, 16) (4, 2, 16, 16)
    """
    return dispatch.run(
        GDN,
        "recurrent",
        *(q, k, v, g, beta),
        gate=gate,
        beta_max=beta_max,
        qk_norm=qk_norm,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        state_dtype=state_dtype,
        return_states=return_states,
        state_slots=state_slots,
        segment_ids=segment_ids,
        num_segments=num_segments,
        implementation=implementation,
    )
