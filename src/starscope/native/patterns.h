// Attention in three steps with what is between them in memory, for whoever looks there or writes there: scores, their
// softmax, and the mix of values by it.
//
// A pattern is float32 [heads][new rows][keys] for each sequence, one sequence after another; keys are those of the
// cache, past and new. Scores are in natural units, and the lowest finite float32 where a key is behind its query. They
// are those of the fused attention, which makes the same steps tile by tile; the mix is of float32 weights and of
// values rounded as there. Keys and values have been appended.
#pragma once

#include <stddef.h>

#include "attention.h"

namespace starscope {

// Called by every thread of the team, within a job, as `attend` is; scratch is of attention_scratch_bytes.
void make_scores(const AttentionKernels& kernels, const AttentionStep& step, float* patterns, Team& team, int thread,
                 uint8_t* scratch);
void make_probabilities(const AttentionKernels& kernels, const AttentionStep& step, float* patterns, Team& team);
void mix_values(const AttentionKernels& kernels, const AttentionStep& step, const float* patterns, Team& team,
                int thread, uint8_t* scratch);

}  // namespace starscope
