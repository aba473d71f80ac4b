/* Made by `make core-layout` from kvstore/arena/format.py, kvstore/arena/index.py and methods.h. */
#ifndef KVSTORE_CORE_LAYOUT_H
#define KVSTORE_CORE_LAYOUT_H

#define CORE_FRAME_BYTES 4096
#define CORE_HEADER_BYTES 64
#define CORE_HEADER_WORDS 8
#define CORE_GENERATION_WORD 0
#define CORE_HASH_WORD 1
#define CORE_DESCRIPTION_WORD 7
#define CORE_EDITION_OFFSET 512
#define CORE_BUCKET_WORDS 8
#define CORE_MOST_REACH 15
#define CORE_HASH_BYTES 32
#define CORE_FACTORS {0x9e3779b97f4a7c15ULL, 0xc2b2ae3d27d4eb4fULL, 0x165667b19e3779f9ULL, 0xd6e8feb86659fd93ULL}
#define CORE_NAMESPACE_FACTOR 0xff51afd7ed558ccdULL
#define CORE_FINAL_FACTOR 0xbf58476d1ce4e5b9ULL
#define CORE_IN_MEMORY 0x80000000ULL
#define CORE_FRAME_MASK 0x7fffffffULL
#define CORE_ABI 0x1e7e07dc8d194a23ULL

#endif
