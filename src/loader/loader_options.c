/* SPDX-License-Identifier: Apache-2.0 */
/* Options of the loader and of packing. */
#include "loader_int.h"

#define ROW(kind, f, ...) LF_ROW_##kind(lf_loader_options, f, __VA_ARGS__)
static const lf_option loader_rows[] = {
    ROW(I32, batch_size, "8", 1, 65536, "Samples a batch on this rank."),
    ROW(I32, depth, "4", 1, 64, "Batches in flight between the stages and the consumer."),
    ROW(I32, threads, "0", 0, 256, "Decode threads; 0: one a core. Results do not depend on it."),
    ROW(I32, image_size, "64", 1, 4096, "Height and width of the delivered images, pixels."),
    ROW(I32, seq_len, "192", 1, 1048576, "Longest text of a sample, tokens; longer ones are cut and counted."),
    ROW(I32, pad_multiple, "16", 0, 65536,
        "A batch is padded to the next multiple of this, at most to seq_len; 0: always to seq_len."),
    ROW(BOOL, shuffle, "true", "A new order each epoch, from the seed; off: the order of ids."),
    ROW(BOOL, augment, "false", "Random crop and mirror image, from (seed, epoch, sample)."),
    ROW(I64, seed, "1", 0, 9e15, "Names the order and the augmentation; the same on all ranks."),
    ROW(I32, rank, "0", 0, 1048575, "Number of this process among `world`."),
    ROW(I32, world, "1", 1, 1048576, "Processes that share an epoch."),
    ROW(BOOL, drop_last, "true",
        "Leave the samples of an incomplete last batch out; off: fill it up with repeated samples of weight 0."),
    ROW(TEXT, bad_samples, "skip", "error|skip|substitute",
        "A damaged sample ends the run, is left out of the loss, or is replaced by another one of the set."),
    ROW(F64, bad_budget, "0.01", 0, 1, "Bad samples beyond this share of the set end the run."),
    ROW(I64, max_pixels, "100000000", 1, 4294967296., "Largest image, pixels; checked before memory is taken for it."),
    ROW(BOOL, blank_images, "false", "Deliver grey images: the control of an evaluation."),
};
#undef ROW

const lf_options_section lf__loader_section = {
    .name = "loader",
    .help = "DataFusion Loader: how samples become batches.",
    .rows = loader_rows,
    .n_rows = LF_COUNT(loader_rows),
    .struct_bytes = sizeof(lf_loader_options),
};

#define ROW(kind, f, ...) LF_ROW_##kind(lf_pack_options, f, __VA_ARGS__)
static const lf_option pack_rows[] = {
    ROW(I64, scenes, "0", 0, 4294967295., "Scenes to draw."),
    ROW(I64, first, "0", 0, 4294967295., "Number of the first scene; sets with disjoint numbers share no scene."),
    ROW(I64, seed, "1", 0, 9e15, "Names the scenes: same seed and number, same bytes."),
    ROW(I32, quality, "85", 1, 100, "JPEG quality of drawn scenes."),
    ROW(BOOL, chroma_420, "true", "Halve the colour resolution of drawn scenes, as most photographs have it."),
    ROW(BOOL, overwrite, "false", "Replace the set that is there."),
    ROW(I32, threads, "0", 0, 256, "Drawing threads; 0: one a core. Results do not depend on it."),
    ROW(I64, map_bytes, "1024GiB", 1048576, 1e15, "Largest size of the set, bytes."),
};
#undef ROW

const lf_options_section lf__pack_section = {
    .name = "pack",
    .help = "Making a data set.",
    .rows = pack_rows,
    .n_rows = LF_COUNT(pack_rows),
    .struct_bytes = sizeof(lf_pack_options),
};
