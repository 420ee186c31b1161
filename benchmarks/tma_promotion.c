/* TMA descriptors with another L2 promotion than JAX's runtime asks for, which is none.

       gcc -O2 -shared -fPIC -o /tmp/tma_promotion.so benchmarks/tma_promotion.c -ldl
       TMA_PROMOTION=3 LD_PRELOAD=/tmp/tma_promotion.so python benchmarks/moe_layer.py ...

   TMA_PROMOTION: 0 none, 1, 2 and 3 for 64, 128 and 256 bytes (CUtensorMapL2promotion). At exit it says how many
   descriptors were made. JAX finds the driver's function with dlsym, so that is what takes its place. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*encode_t)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                        const uint32_t *, int, int, int, int);
static encode_t encode;
static int promotion = -1;
static long made;

static void report(void) { fprintf(stderr, "%ld descriptors with L2 promotion %d\n", made, promotion); }

static int promoted(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                    const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int asked, int fill) {
  if (promotion < 0) {
    const char *text = getenv("TMA_PROMOTION");
    promotion = text ? atoi(text) : asked;
    atexit(report);
  }
  made++;
  return encode(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill);
}

void *dlsym(void *handle, const char *name) {
  static void *(*usual)(void *, const char *);
  if (!usual) usual = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  void *found = usual(handle, name);
  if (!found || strcmp(name, "cuTensorMapEncodeTiled")) return found;
  encode = (encode_t)found;
  return (void *)promoted;
}
