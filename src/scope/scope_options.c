/* SPDX-License-Identifier: Apache-2.0 */
/* Options of a training run, section "train". The defaults are those of the tiny preset on a CPU; docs/internals/options.md
 * lists what the larger presets want. */
#include "base/base.h"
#include "loongforge/scope.h"

extern const lf_options_section lf__train_section;

static const lf_option rows[] = {
    LF_ROW_TEXT(lf_train_options, preset, "tiny", "tiny|small|n16",
                "size of the model: tiny trains on a CPU, small has about 100 M parameters, n16 about 1.6 B"),
    LF_ROW_TEXT(lf_train_options, data, "", NULL, "LMDB folder to train on (`loongforge pack` makes one); must be given"),
    LF_ROW_TEXT(lf_train_options, val_data, "", NULL, "LMDB folder to evaluate on; empty: no evaluation"),
    LF_ROW_TEXT(lf_train_options, name, "run", NULL, "name of the run; its files go to <runs_dir>/<name>"),
    LF_ROW_TEXT(lf_train_options, runs_dir, "runs", NULL, "folder that runs are kept in"),
    LF_ROW_TEXT(lf_train_options, device, "auto", NULL, "auto, cpu, cuda or cuda:N; auto takes a GPU when there is one"),
    LF_ROW_TEXT(lf_train_options, attention, "dsa", "dsa|dense",
                "dsa: dynamic sparse attention over chosen key blocks; dense: full causal attention"),
    LF_ROW_TEXT(lf_train_options, dtype, "auto", "auto|f32|bf16", "type of the weights; auto: f32 on a CPU, bf16 on a GPU"),
    LF_ROW_I64(lf_train_options, steps, "1000", 1, 1e12, "optimizer steps of the whole run, those before a resume included"),
    LF_ROW_I32(lf_train_options, batch_size, "32", 1, 65536, "samples a step, over all ranks and micro steps"),
    LF_ROW_I32(lf_train_options, micro_steps, "1", 1, 4096, "parts a rank's batch is cut into; gradients add up over them"),
    LF_ROW_BOOL(lf_train_options, capture, "true", "on a GPU: capture the whole step once as a CUDA graph and replay it"),
    LF_ROW_I32(lf_train_options, threads, "0", 0, 1024, "threads that compute on the CPU; 0: one a core"),
    LF_ROW_F64(lf_train_options, lr, "1e-3", 0, 10, "learning rate after warm-up"),
    LF_ROW_F64(lf_train_options, min_lr_ratio, "0.05", 0, 1, "share of lr that the cosine decay ends at; 1: no decay"),
    LF_ROW_F64(lf_train_options, weight_decay, "0.05", 0, 1, "AdamW's decay of weights that have more than one dimension"),
    LF_ROW_F64(lf_train_options, beta1, "0.9", 0, 0.999999, "AdamW's decay of the mean gradient"),
    LF_ROW_F64(lf_train_options, beta2, "0.98", 0, 0.999999, "AdamW's decay of the mean squared gradient"),
    LF_ROW_F64(lf_train_options, eps, "1e-8", 1e-16, 1, "AdamW's term against division by zero"),
    LF_ROW_F64(lf_train_options, clip, "1.0", 0, 1e9, "largest norm of all gradients together; 0: no clipping"),
    LF_ROW_I64(lf_train_options, warmup_steps, "60", 0, 1e12, "steps over which the learning rate rises from 0 to lr"),
    LF_ROW_I64(lf_train_options, seed, "1", 0, 9007199254740991.0,
               "seed of weights, order of samples, augmentation and router noise"),
    LF_ROW_I64(lf_train_options, eval_every, "250", 0, 1e12, "steps between evaluations; 0: only at the end"),
    LF_ROW_I64(lf_train_options, log_every, "20", 1, 1e12, "steps between lines on the console; the log file has every step"),
    LF_ROW_BOOL(lf_train_options, resume, "false", "go on from the newest checkpoint of the run; start anew when it has none"),
    LF_ROW_BOOL(lf_train_options, eval, "true", "evaluate at the end: held-out loss, blanked images, colour and shape words"),
};

const lf_options_section lf__train_section = {"train", "a training run", rows, LF_COUNT(rows), sizeof(lf_train_options)};
