"""Which tests guard which files (see mutate.py), and mutants that change nothing that a user could notice."""

from tests.support import typed

GUARDS = [
    (
        typed("""
            inference/verify.py inference/tree.py inference/sampling.py heads/attention/masks.py heads/caches/kv_cache.py
            heads/caches/layers.py
        """),
        typed("""
            tests/inference/test_verify.py tests/inference/test_sampling.py tests/inference/test_engine_states.py
            tests/inference/test_engine.py tests/inference/test_engine_faults.py tests/attention/test_attention.py
            tests/inference/test_prefill.py::test_a_conversation_goes_on_from_its_answer
            tests/inference/test_prefill.py::test_what_happens_while_a_prompt_is_read
            tests/inference/test_drafters.py::test_a_tree_stops_where_little_is_left_to_gain
            tests/inference/test_drafters.py::test_a_union_accepts_at_least_what_each_accepts_alone
            tests/attention/test_flex.py::test_a_mask_without_memory_is_a_tensor_for_others
            tests/attention/test_window_layers.py
        """),
    ),
    (
        typed("heads/caches/state_cache.py heads/caches/stacked_cache.py heads/caches/recurrent_ops.py"),
        typed("""
            tests/target_model/test_chains.py
            tests/inference/test_prefill.py::test_a_conversation_with_a_hybrid
            tests/inference/test_prefill.py::test_what_happens_while_a_prompt_is_read
            tests/target_model/test_versions.py::test_a_cache_is_cropped_only_if_that_leaves_no_trace
        """),
    ),
    (
        typed("train/data/packing.py train/runtime/run_state.py heads/base.py train/module.py"),
        typed("""
            tests/data/test_packing.py tests/train/test_run_settings.py tests/heads/test_heads.py
            tests/train/test_gradients.py tests/train/test_losses.py
            tests/train/test_step.py tests/heads/test_lm_head.py tests/heads/test_blocks.py
            tests/attention/test_row_parts.py::test_the_tables_of_parts_are_those_of_the_definition
            tests/evaluation/test_held_out.py::test_agreement_and_acceptance_are_those_of_an_independent_count
            tests/target_model/test_images.py::test_documents_of_a_packed_batch_are_what_transformers_makes_of_each
        """),
    ),
]

FASTER = "only its speed differs"
EQUIVALENT = {
    "inference/verify.py argmax: logits.device.type == 'cpu' -> logits.device.type != 'cpu'": FASTER,
    "inference/verify.py argmax: logits.device.type == 'cpu' and logits.dtype in (torch.bfloat16, torch.float16) -> "
    "logits.device.type == 'cpu' or logits.dtype in (torch.bfloat16, torch.float16)": FASTER,
    "inference/verify.py verify: last[:, None, None].expand(-1, 1, nodes) -> last[:, None, None].expand(-1, 2, nodes)": (
        "the second row is not used"
    ),
    "heads/caches/layers.py CacheLayer.write: new_states[0] -> new_states[1]": "keys and values are on one device",
    "heads/caches/layers.py CacheLayer.states: self.keys is None or self.values is None -> "
    "self.keys is None and self.values is None": "keys and values are allocated together",
    "inference/sampling.py Sampling.warp: too_few if candidates < logits.shape[-1] else None -> "
    "too_few if candidates <= logits.shape[-1] else None": "of all candidates, none are too few",
    "heads/caches/layers.py WindowLayer.update: newest.minimum(last - 1) -> newest.minimum(last + 1)": (
        "behind the window, a ring has room for the largest tree"
    ),
    "heads/caches/kv_cache.py KVCache._is_empty: return not any(self.lengths) and self.num_uncommitted == 0 -> "
    "return None": FASTER,
    "heads/caches/kv_cache.py KVCache._is_empty: not any(self.lengths) and self.num_uncommitted == 0 -> "
    "not any(self.lengths) and self.num_uncommitted != 0": FASTER,
    "heads/caches/layers.py CacheLayer.written: return slice(length) -> return None": "more than the text is copied",
    "heads/caches/kv_cache.py KVCache.commit: self.kv_bucket is not None -> self.kv_bucket is None": FASTER,
    "heads/caches/state_cache.py StateCache.forward_chain: slot.num_computed_tokens <= boundary < length -> "
    "slot.num_computed_tokens <= boundary <= length": FASTER,
    "heads/caches/kv_cache.py KVCache.columns: self.capacity - 1 -> self.capacity - 2": "a slot has room behind its text",
    "heads/caches/state_cache.py StateCache.mask: return among -> return None": "chains have no mask",
    "heads/caches/stacked_cache.py StackedCache.watched: self.new_counts is None and new > 1 -> "
    "self.new_counts is None or new > 1": FASTER,
    "heads/caches/stacked_cache.py StackedCache.watched: self.new_counts is None and new > 1 -> "
    "self.new_counts is None and new >= 1": FASTER,
    "heads/caches/recurrent_ops.py RecurrentOp.__call__: args[0].shape[1] -> args[0].shape[2]": FASTER,
    "heads/caches/recurrent_ops.py RecurrentOp.__call__: min(args[0].shape[1], kwargs.get('chunk_size', CHUNK)) -> "
    "max(args[0].shape[1], kwargs.get('chunk_size', CHUNK))": FASTER,
    "heads/caches/recurrent_ops.py RecurrentOp.__call__: CONTEXT.records and kwargs.get('dt_limit', (0.0,))[0] == 0 -> "
    "CONTEXT.records or kwargs.get('dt_limit', (0.0,))[0] == 0": "only what is recorded is read",
    "heads/caches/recurrent_ops.py watched: (False, None, False, None) -> (False, None, True, None)": (
        "only watched forwards record"
    ),
    "heads/caches/recurrent_ops.py RecurrentOp.__init__: functools.update_wrapper(self, function) -> pass": (
        "its name is for tracebacks"
    ),
    "train/runtime/run_state.py check_same_run: True -> False": "the line is printed later",
    "heads/caches/state_cache.py StateCache.forward_chain: real - early -> real + early": "surplus logits are cut off",
    "heads/caches/state_cache.py StateCache.forward_chain: nodes > 1 -> nodes > 2": FASTER,
    "heads/caches/recurrent_ops.py Call.until: self.args[0] -> self.args[1]": "both are on one device, of one length",
    "train/module.py DistillationModel.depth_loss: draft.max(-1) -> draft.max(1)": "drafts have two dimensions",
    "heads/caches/stacked_cache.py StackedCache.use: self.states and list(rows) != self.rows -> "
    "self.states or list(rows) != self.rows": FASTER,
    "heads/caches/stacked_cache.py StateLayer.update_recurrent_state: return state -> return None": (
        "transformers' layers do not use the result"
    ),
    "heads/caches/recurrent_ops.py RecurrentOp.__call__: args[0] -> args[1]": "both are on one device, of one length",
    "heads/caches/recurrent_ops.py RecurrentOp.__call__: torch.compiler.is_compiling() or not CONTEXT.watched -> "
    "torch.compiler.is_compiling() and (not CONTEXT.watched)": "a call that nobody watches is recorded for nobody",
    "train/module.py DistillationModel.compute_loss: max(1, len(rows)) -> max(2, len(rows))": "a part has more rows",
    "inference/tree.py from_parents: levels < depth -> levels <= depth": FASTER,
    "heads/caches/kv_cache.py KVCache.can_rewind: max(0, earlier - rings.window) >= length + rings.nodes - rings.ring -> "
    "max(0, earlier - rings.window) > length + rings.nodes - rings.ring": FASTER,
    "heads/caches/kv_cache.py KVCache.can_rewind: rings is None or rings.ring >= self.capacity -> "
    "rings is None or rings.ring > self.capacity": "the comparison after it says the same",
    "heads/caches/layers.py zeros: sys.platform != 'linux' -> sys.platform == 'linux'": "only the size of pages differs",
    "heads/caches/layers.py zeros: device.type != 'cpu' -> device.type == 'cpu'": "only when memory is taken differs",
    "heads/caches/layers.py zeros: memory.madvise(mmap.MADV_NOHUGEPAGE) -> pass": "only the size of pages differs",
    "heads/caches/layers.py WindowLayer.cached_entries: cache.width(new) <= ring -> cache.width(new) < ring": (
        "such a ring is in order"
    ),
    "heads/caches/stacked_cache.py stacks: bool(kinds & RECURRENT) -> bool(kinds | RECURRENT)": (
        "a measurement finds that the others cannot be stacked"
    ),
    "inference/sampling.py nucleus: mass.sum() >= wanted -> mass.sum() > wanted": FASTER,
    "inference/sampling.py nucleus: (1 - p) / len(logits) -> (1 + p) / len(logits)": FASTER,
    "inference/sampling.py nucleus: (1 - p) / TOP_P_CANDIDATES -> (1 + p) / TOP_P_CANDIDATES": FASTER,
    "inference/sampling.py nucleus: 1 - p -> 2 - p": FASTER,
    "inference/sampling.py gumbel: wrap(MULTIPLIERS_32[1], 32) -> wrap(MULTIPLIERS_32[1], 33)": "the same modulo 2^32",
    "inference/sampling.py gumbel: (shift(mix(keys), 40).float() + 0.5) * 2.0 ** (-24) -> "
    "(shift(mix(keys), 40).float() - 0.5) * 2.0 ** (-24)": "matters for one number in 2^55",
    "inference/sampling.py gumbel: wrap(MULTIPLIERS_32[0], 32) -> wrap(MULTIPLIERS_32[0], 33)": "the same modulo 2^32",
    "inference/sampling.py nucleus: break -> pass": FASTER,
    "inference/sampling.py top_p: (total[..., -1:] < wanted) & (p < 1) -> (total[..., -1:] <= wanted) & (p < 1)": FASTER,
    "inference/sampling.py top_p_on_cpu: (row, place, 0) -> (row, place, 1)": "one NaN makes all of them NaN",
    "inference/sampling.py Sampling.warp: min(self.largest_k, logits.shape[-1]) -> "
    "max(self.largest_k, logits.shape[-1])": FASTER,
    "inference/sampling.py Sampling.process: torch.where(logits > 0, logits / penalty, logits * penalty) -> "
    "torch.where(logits >= 0, logits / penalty, logits * penalty)": "0 stays 0",
    "inference/sampling.py token_hashes: 4 -> 5": FASTER,
    "heads/caches/kv_cache.py KVCache.__init__: width < self.key_block -> width <= self.key_block": FASTER,
    "heads/caches/layers.py CacheLayer.erase: 0 -> 1": "any finite number will do",
    "heads/caches/state_cache.py StateCache.forward_chain: (state, tokens, slot.text.shape[1] + 1) -> "
    "(state, tokens, slot.text.shape[1] - 1)": "of a single token none is rejected",
    "heads/caches/stacked_cache.py stacks: bool(kinds & RECURRENT) and kinds <= STACKED -> "
    "bool(kinds & RECURRENT) or kinds <= STACKED": "a measurement finds that the others cannot be stacked",
    "inference/sampling.py Sampling.of: 1 -> 2": "it is at least SMALL_K",
    "inference/sampling.py nucleus: max(1, int(p * SCALE)) -> max(2, int(p * SCALE))": "matters for p below 2 / SCALE",
    "inference/sampling.py nucleus: np.flatnonzero(probabilities >= least) -> np.flatnonzero(probabilities > least)": FASTER,
    "heads/caches/kv_cache.py KVCache._is_empty: self.num_uncommitted == 0 -> self.num_uncommitted == 1": (
        "a cache without text has no uncommitted entries"
    ),
    "heads/caches/kv_cache.py KVCache.width: short >= width - before -> short > width - before": FASTER,
    "heads/caches/kv_cache.py KVCache.commit: [0] -> [1]": "padding is arbitrary",
    "heads/caches/kv_cache.py KVCache.columns: self.newest_columns[0] -> self.newest_columns[1]": FASTER,
    "heads/caches/state_cache.py StateCache.__init__: False -> True": "it decodes without graphs anyway",
    "heads/caches/state_cache.py StateCache.__init__: [0] -> [1]": "a slot is truncated before it gets a text",
    "heads/caches/state_cache.py StateCache.forward_chain: nodes > 1 -> nodes >= 1": FASTER,
    "heads/caches/state_cache.py StateCache.forward_chain: nodes == 1 or can_crop(slot.state) -> "
    "nodes == 1 and can_crop(slot.state)": FASTER,
    "heads/caches/state_cache.py StateCache.forward_chain: slot.text.shape[1] + 1 -> slot.text.shape[1] + 2": (
        "its state is written in place"
    ),
    "heads/caches/stacked_cache.py StackedCache.commit: (0 < len(nodes) < self.new for nodes in path) -> "
    "(0 < len(nodes) <= self.new for nodes in path)": FASTER,
    "heads/caches/stacked_cache.py StackedCache.commit: (0 < len(nodes) < self.new for nodes in path) -> "
    "(0 <= len(nodes) < self.new for nodes in path)": FASTER,
    "heads/caches/stacked_cache.py stacks: bool(kinds & RECURRENT) and kinds <= STACKED -> "
    "bool(kinds & RECURRENT) and kinds < STACKED": "no model has layers of all kinds",
    "heads/caches/stacked_cache.py StateLayer.__init__: False -> True": "only methods that it replaces read it",
    "train/data/packing.py best_fit: length + 1 -> length + 2": "one more empty list",
    "train/data/packing.py best_fit: (fitting & -fitting).bit_length -> (fitting | -fitting).bit_length": (
        "the negative of the same number"
    ),
    "train/data/packing.py best_fit: 0 -> 1": "no document is empty",
    "train/data/packing.py Packed.__getitem__: -1 -> -2": "any negative number will do",
    "train/data/packing.py Packed.__init__: np.flatnonzero(whole > length) -> np.flatnonzero(whole >= length)": (
        "a document as long as a row has no rest"
    ),
    "train/runtime/run_state.py open_directory: True -> False": "the line is printed later",
    "train/runtime/run_state.py set_aside: range(1, 10000) -> range(1, 10001)": "nobody has as many runs",
    "train/module.py DistillationModel.guesses: self.target.logits(part).argmax(-1) -> "
    "self.target.logits(part).argmax(1)": "the logits have two dimensions",
    "heads/caches/kv_cache.py KVCache.commit: len(nodes) - 1 -> len(nodes) - 2": FASTER,
    "train/module.py DistillationModel.guesses: last.flatten(0, 1) -> last.flatten(1, 1)": (
        "only the memory that it takes differs"
    ),
    "heads/caches/kv_cache.py KVCache.width: short >= width - before -> short >= width + before": FASTER,
    "train/runtime/run_state.py set_aside: True -> False": "the line is printed later",
    "heads/caches/kv_cache.py KVCache.__init__: ([0] * num_slots, 0) -> ([0] * num_slots, 1)": FASTER,
    "heads/caches/kv_cache.py KVCache.commit: nodes[-1] != len(nodes) - 1 -> nodes[-1] != len(nodes) + 1": FASTER,
    "heads/caches/layers.py CacheLayer.move: cache.batch == 1 and cache.kv_bucket is None -> "
    "cache.batch == 1 and cache.kv_bucket is not None": FASTER,
    "heads/caches/layers.py WindowLayer.written: return slice(self.num_columns) -> return None": "None is all columns, too",
    "heads/caches/layers.py WindowLayer.update: cache.width(new) <= ring -> cache.width(new) < ring": (
        "such a ring is in order"
    ),
}
