#pragma once
// The constants a kernel is specialised by, with values that let an editor or nvcc read the files. When a kernel is compiled for use,
// cuda/driver/jit.cpp puts a text with the real ones in this file's place.

// Constants of every kernel.
constexpr int kArch = 900;            // 800 for sm_80, 1200 for sm_120
constexpr bool kArchFeatures = true;  // the instructions of exactly this architecture are there too: sm_90a, sm_100a

// write_kv.cu
constexpr int kFrom = 2, kTo = 3;  // ElementType
constexpr int kDimK = 128, kDimV = 128, kBlockSize = 16;

// attention_sm80.cu (cuda/attention/attention_sm80.cpp) and, of these, what merge.cu needs
constexpr int kHeadDimQk = 128, kHeadDimV = 128, kGroup = 4;  // kBlockSize 0: ragged
constexpr int kQType = 2, kKvType = 2, kOutType = 2;          // ElementType
constexpr bool kCausal = true, kWindow = false;               // kWindow: any of window_left, window_right, chunk
constexpr bool kCustomMask = false;                           //
constexpr bool kHeadScales = false;                           // a scale for each q head, or one that is not positive
constexpr bool kSoftCap = false, kAlibi = false, kAlibiSqrt = false, kRelative = false, kSinks = false;
constexpr bool kScoreMod = false, kMaskMod = false;         // the text of attention_expression.cuh's functions follows
constexpr bool kScoreAffine = false;                        // that of affine_score() too
constexpr bool kShortSums = false;                          // merge.cu: lists may ask for it (MergeList::are_short)
constexpr bool kValuesInKeys = false;                       // values are the first kHeadDimV elements of the keys
constexpr int kTileRows = 16, kTileKeys = 64;               // of a thread block at a time
constexpr int kItemRows = 16;                               // of a work item and kv head at most, unless a token has more
constexpr int kRowWarps = 1, kKeyWarps = 4, kDimWarps = 1;  // warps that share out rows, keys of a tile (1: prefill), dims of the output
constexpr int kStages = 3;                                  // tiles of keys and values in shared memory
constexpr int kBlocks = 2;  // thread blocks, or crews of one, on a multiprocessor that registers have to suffice for

// attention_sm90.cu, besides
constexpr bool kFromBytes = false;  // the cache has bytes, whoever has widened them: values and weights are f16 then
constexpr int kCluster = 1;         // thread blocks that share the keys of an item, and its rows among them: kTileRows each
constexpr int kScoreColumns = 0, kScoreHeadColumns = 0, kScoreRows = 0;  // attention_sm90_score.cuh: parts of score_mod()

// attention_sm90_decode.cu, attention_sm90_verify.cu and attention_sm90_latent*.cu, besides
constexpr bool kMaps = true;                 // TMA can read the keys and values
constexpr int kKWidth = 128, kVWidth = 128;  // bytes of a row of keys, of values, in a box; see attention_sm90_stream.cuh
constexpr int kValueStages = 3;  // attention_sm90_verify.cu has other numbers of keys and of values in shared memory, and kKeyWarps 0

// short_conv.cu (cuda/short_conv/short_conv.cpp), besides kBlocks and kStages: of tokens
constexpr int kType = 2, kWidth = 3;  // ElementType; tokens of a sum
constexpr bool kHasBias = false;
constexpr bool kGated = true, kSilu = false;  // forms of a layer
constexpr bool kTree = false;                 // of this, recurrent.cu, recurrent_narrow.cu and attention: drafts may be a tree

// Those of cuda/recurrent (cuda/recurrent/recurrent.cpp), besides kType, kDimK and kDimV
constexpr int kStateType = 0;       // ElementType
constexpr bool kKeysFirst = false;  // StateLayout::k_first
constexpr bool kChannelGate = false, kChannelRates = false;
constexpr bool kDelta = true, kNorms = true;          // RecurrentSpec::delta, qk_norm
constexpr int kShared = 4;                            // value heads that a thread block of recurrent_weights.cu makes weights of
constexpr int kTileValues = 64, kBlocksTogether = 2;  // of recurrent_chunks.cu: values of a thread block, and blocks of a multiprocessor
constexpr int kOutGate = 1, kOutNorm = 1;             // OutputGateKind, OutputNormKind
constexpr int kOutputLanes = 16, kKept = 1;           // of recurrent_outputs.cu: lanes of a group, and its eights that a lane keeps

// gather_latents.cu (cuda/mla/steps.cpp), besides kFrom and kTo
constexpr int kLatentFormat = 0;  // LatentFormat
