// The pool as the loader sees it.
#include "pool.h"

extern "C" {
void* pool_create(int threads) { return new Pool(threads); }
void pool_destroy(void* pool) { delete (Pool*)pool; }
void pool_after_fork(void* pool) { ((Pool*)pool)->after_fork(); }
}
