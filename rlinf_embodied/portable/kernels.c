/* What torch takes from MKL and oneDNN, in one definition of bits for every x86-64 processor with AVX2 and FMA.

   Loaded before libtorch_cpu.so, whose calls then end here: it reaches BLAS, MKL's vector mathematics and the switches
   of oneDNN and NNPACK through its symbol table.

   Products.  C = alpha A B + beta C is, per element and for chunks of CHUNK terms of the inner dimension, in order,

       s = 0;  for k in chunk: s = fma(a[m, k], b[k, n], s)          one chain, no other bracket
       C = alpha s + beta C   (first chunk)        C = C + alpha s   (the others)

   each operation rounded once.  Nothing else enters: not the tile, not the cache, not the neighbours in the batch.

   Functions of one variable are Sleef's AVX2 and FMA variants, which are part of libtorch_cpu.so: the ones that ATen
   itself uses where it does not ask MKL.  */

#include <dlfcn.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, COLUMNS = 6, MOST_COLUMNS = 12, CHUNK = 256, ROWS = 128 };

typedef struct { /* a matrix inside another: element (i, j) is at[i * row + j * column] */
  const float *at;
  int64_t row, column;
} View;

EXPORT int rlinf_portable_version(void) { return 1; }

static int columns_of_tile = COLUMNS; /* more with AVX-512's 32 registers */

/* Chooses vectors of 512 bits where there are some, or not; the bits do not depend on it.  Returns what is used. */
EXPORT int rlinf_portable_vectors(int widest) {
  columns_of_tile = widest >= 512 && __builtin_cpu_supports("avx512f") ? MOST_COLUMNS : COLUMNS;
  return columns_of_tile == COLUMNS ? 256 : 512;
}

__attribute__((constructor)) static void choose_vectors(void) { rlinf_portable_vectors(512); }

/* ------------------------------------------------------------------------------------------------------- products */

static float *scratch(int64_t size, int slot) {
  static __thread float *held[2];
  static __thread int64_t sizes[2];
  if (sizes[slot] < size) {
    free(held[slot]);
    held[slot] = aligned_alloc(64, (size_t)size * sizeof(float));
    if (held[slot] == NULL) abort();
    sizes[slot] = size;
  }
  return held[slot];
}

/* acc[j][i] = chain over k of a[k][i] * b(k, j) for LANES i and `columns` (a constant) j. */
INLINE void chains(int columns, int64_t depth, const float *a, int64_t a_step, const float *b, int64_t b_row,
                   int64_t b_column, __m256 acc[COLUMNS][2]) {
#pragma GCC unroll 6
  for (int j = 0; j < columns; j++) acc[j][0] = acc[j][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    const __m256 low = _mm256_loadu_ps(a), high = _mm256_loadu_ps(a + 8);
#pragma GCC unroll 6
    for (int j = 0; j < columns; j++) {
      const __m256 factor = _mm256_broadcast_ss(b + j * b_column);
      acc[j][0] = _mm256_fmadd_ps(low, factor, acc[j][0]);
      acc[j][1] = _mm256_fmadd_ps(high, factor, acc[j][1]);
    }
    a += a_step, b += b_row;
  }
}

typedef struct {
  float *at;
  int64_t row, column;
  float alpha, beta; /* beta is 1 in all chunks but the first */
} Target;

INLINE __m256 mixed(__m256 sum, const float *old, float alpha, float beta) {
  const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(alpha), sum);
  if (beta == 0.0f) return scaled;
  return _mm256_add_ps(scaled, _mm256_mul_ps(_mm256_set1_ps(beta), _mm256_loadu_ps(old)));
}

INLINE void tile(int columns, int64_t depth, const float *a, int64_t a_step, const float *b, int64_t b_row,
                 int64_t b_column, Target c, int rows) {
  __m256 acc[COLUMNS][2];
  chains(columns, depth, a, a_step, b, b_row, b_column, acc);
  if (rows == LANES && c.row == 1) {
#pragma GCC unroll 6
    for (int j = 0; j < columns; j++) {
      float *out = c.at + j * c.column;
      _mm256_storeu_ps(out, mixed(acc[j][0], out, c.alpha, c.beta));
      _mm256_storeu_ps(out + 8, mixed(acc[j][1], out + 8, c.alpha, c.beta));
    }
    return;
  }
  float sums[COLUMNS][LANES];
#pragma GCC unroll 6
  for (int j = 0; j < columns; j++) {
    _mm256_storeu_ps(sums[j], acc[j][0]);
    _mm256_storeu_ps(sums[j] + 8, acc[j][1]);
  }
  for (int j = 0; j < columns; j++)
    for (int i = 0; i < rows; i++) {
      float *out = c.at + i * c.row + j * c.column;
      const float scaled = c.alpha * sums[j][i];
      *out = c.beta == 0.0f ? scaled : scaled + c.beta * *out;
    }
}

/* The same with one vector of 512 bits a column: the chains are the same. */
#define WIDE __attribute__((target("avx512f")))
WIDE static inline __attribute__((always_inline)) void wide_tile(int columns, int64_t depth, const float *a,
                                                                 int64_t a_step, const float *b, int64_t b_row,
                                                                 int64_t b_column, Target c) {
  __m512 acc[MOST_COLUMNS];
#pragma GCC unroll 12
  for (int j = 0; j < columns; j++) acc[j] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    const __m512 left = _mm512_loadu_ps(a);
#pragma GCC unroll 12
    for (int j = 0; j < columns; j++) acc[j] = _mm512_fmadd_ps(left, _mm512_set1_ps(b[j * b_column]), acc[j]);
    a += a_step, b += b_row;
  }
#pragma GCC unroll 12
  for (int j = 0; j < columns; j++) {
    float *out = c.at + j * c.column;
    __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(c.alpha), acc[j]);
    if (c.beta != 0.0f) {
      const __m512 kept = _mm512_mul_ps(_mm512_set1_ps(c.beta), _mm512_loadu_ps(out));
      scaled = _mm512_add_ps(scaled, kept);
    }
    _mm512_storeu_ps(out, scaled);
  }
}

#define CASES(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define MORE_CASES(CASE) CASES(CASE) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#define NARROW_CASE(N) case N: tile(N, depth, a, a_step, b, b_row, b_column, c, rows); break;
#define WIDE_CASE(N) case N: wide_tile(N, depth, a, a_step, b, b_row, b_column, c); break;

static void tiles(int columns, int64_t depth, const float *a, int64_t a_step, const float *b, int64_t b_row,
                  int64_t b_column, Target c, int rows) {
  switch (columns) { CASES(NARROW_CASE) }
}

WIDE static void wide_tiles(int columns, int64_t depth, const float *a, int64_t a_step, const float *b, int64_t b_row,
                            int64_t b_column, Target c, int rows) {
  if (rows == LANES && c.row == 1) {
    switch (columns) { MORE_CASES(WIDE_CASE) }
    return;
  }
  float sums[MOST_COLUMNS][LANES];
  const Target to = {sums[0], 1, LANES, 1.0f, 0.0f};
  switch (columns) {
#define INTO_SUMS(N) case N: wide_tile(N, depth, a, a_step, b, b_row, b_column, to); break;
    MORE_CASES(INTO_SUMS)
  }
  for (int j = 0; j < columns; j++)
    for (int i = 0; i < rows; i++) {
      float *out = c.at + i * c.row + j * c.column;
      const float scaled = c.alpha * sums[j][i];
      *out = c.beta == 0.0f ? scaled : scaled + c.beta * *out;
    }
}

/* out[k][0..8) = a[0..8)[k], for eight k: an eight by eight transposition in registers. */
INLINE void turn(const float *a, int64_t row, float *out) {
  __m256 r[8], s[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(a + i * row);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + i * LANES, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * LANES, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

/* out[k][0..LANES) = a(0..rows, k), zeros behind. */
static void pack(View a, int rows, int64_t depth, float *out) {
  int64_t k = 0;
  if (rows == LANES && a.column == 1)
    for (; k + 8 <= depth; k += 8) {
      turn(a.at + k, a.row, out + k * LANES);
      turn(a.at + k + 8 * a.row, a.row, out + k * LANES + 8);
    }
  for (; k < depth; k++) {
    const float *from = a.at + k * a.column;
    float *to = out + k * LANES;
    if (rows == LANES && a.row == 1) {
      memcpy(to, from, LANES * sizeof(float));
      continue;
    }
    for (int i = 0; i < rows; i++) to[i] = from[i * a.row];
    for (int i = rows; i < LANES; i++) to[i] = 0.0f;
  }
}

static void pack_columns(const float *b, int64_t row, int columns, int64_t depth, float *out) {
  if (columns == MOST_COLUMNS)
    for (int64_t k = 0; k < depth; k++) memcpy(out + k * MOST_COLUMNS, b + k * row, MOST_COLUMNS * sizeof(float));
  else if (columns == COLUMNS)
    for (int64_t k = 0; k < depth; k++) memcpy(out + k * COLUMNS, b + k * row, COLUMNS * sizeof(float));
  else
    for (int64_t k = 0; k < depth; k++)
      for (int j = 0; j < columns; j++) out[k * columns + j] = b[k * row + j];
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t num_products;
/* How often this library was asked, modulo races: whoever checks that it is in use asks for it. */
EXPORT int64_t rlinf_portable_products(void) { return num_products; }

static void product(int64_t m, int64_t n, int64_t depth, View a, View b, Target c) {
  num_products++;
  if (m <= 0 || n <= 0) return;
  if (c.alpha == 0.0f) depth = 0;
  if (depth <= 0) {
    for (int64_t j = 0; j < n; j++)
      for (int64_t i = 0; i < m; i++) {
        float *out = c.at + i * c.row + j * c.column;
        *out = c.beta == 0.0f ? 0.0f : c.beta * *out;
      }
    return;
  }
  if (m < 8 && n > m) { /* lanes along the longer side: the chains are the same */
    const View a_turned = {a.at, a.column, a.row}, b_turned = {b.at, b.column, b.row};
    product(n, m, depth, b_turned, a_turned, (Target){c.at, c.column, c.row, c.alpha, c.beta});
    return;
  }
  const int64_t width = columns_of_tile;
  const int packs = a.row != 1 || n >= 4 * COLUMNS;
  const int packs_columns = b.column == 1 && b.row > 64 && n >= COLUMNS && m >= 4 * LANES;
  float *panels = scratch(ROWS * CHUNK, 0), *strip = scratch(MOST_COLUMNS * CHUNK, 1);
  for (int64_t k0 = 0; k0 < depth; k0 += CHUNK) {
    const int64_t length = least(CHUNK, depth - k0);
    const float beta = k0 == 0 ? c.beta : 1.0f;
    for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
      const int64_t rows = least(ROWS, m - i0);
      for (int64_t i = 0; i < rows; i += LANES) {
        const int held = (int)least(LANES, rows - i);
        const View part = {a.at + (i0 + i) * a.row + k0 * a.column, a.row, a.column};
        if (packs || held < LANES) pack(part, held, length, panels + i * CHUNK);
      }
      for (int64_t j = 0; j < n; j += width) {
        const int columns = (int)least(width, n - j);
        const float *right = b.at + k0 * b.row + j * b.column;
        int64_t right_row = b.row, right_column = b.column;
        if (packs_columns) {
          pack_columns(right, b.row, columns, length, strip);
          right = strip, right_row = columns, right_column = 1;
        }
        for (int64_t i = 0; i < rows; i += LANES) {
          const int held = (int)least(LANES, rows - i);
          const int packed = packs || held < LANES;
          const float *left = packed ? panels + i * CHUNK : a.at + i0 + i + k0 * a.column;
          const Target to = {c.at + (i0 + i) * c.row + j * c.column, c.row, c.column, c.alpha, beta};
          const int64_t step = packed ? LANES : a.column;
          if (width == COLUMNS)
            tiles(columns, length, left, step, right, right_row, right_column, to, held);
          else
            wide_tiles(columns, length, left, step, right, right_row, right_column, to, held);
        }
      }
    }
  }
}

static View oriented(const float *at, int64_t leading, char trans) {
  return trans == 'n' || trans == 'N' ? (View){at, 1, leading} : (View){at, leading, 1};
}

EXPORT void sgemm_(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k,
                   const float *alpha, const float *a, const int *lda, const float *b, const int *ldb,
                   const float *beta, float *c, const int *ldc) {
  product(*m, *n, *k, oriented(a, *lda, *trans_a), oriented(b, *ldb, *trans_b), (Target){c, 1, *ldc, *alpha, *beta});
}

enum { ROW_MAJOR = 101, NO_TRANS = 111 };

EXPORT void cblas_sgemm_batch(int layout, const int *trans_a, const int *trans_b, const int *m, const int *n,
                              const int *k, const float *alpha, const float **a, const int *lda, const float **b,
                              const int *ldb, const float *beta, float **c, const int *ldc, int groups,
                              const int *sizes) {
  for (int g = 0, at = 0; g < groups; at += sizes[g++])
    for (int i = at; i < at + sizes[g]; i++) {
      View left = oriented(a[i], lda[g], trans_a[g] == NO_TRANS ? 'n' : 't');
      View right = oriented(b[i], ldb[g], trans_b[g] == NO_TRANS ? 'n' : 't');
      Target to = {c[i], 1, ldc[g], alpha[g], beta[g]};
      if (layout == ROW_MAJOR) {
        left = (View){left.at, left.column, left.row}, right = (View){right.at, right.column, right.row};
        to.row = ldc[g], to.column = 1;
      }
      product(m[g], n[g], k[g], left, right, to);
    }
}

EXPORT void sgemv_(const char *trans, const int *m, const int *n, const float *alpha, const float *a, const int *lda,
                   const float *x, const int *incx, const float *beta, float *y, const int *incy) {
  const int turned = *trans != 'n' && *trans != 'N';
  const int64_t rows = turned ? *n : *m, depth = turned ? *m : *n;
  const float *from = *incx < 0 ? x - (depth - 1) * *incx : x;
  float *to = *incy < 0 ? y - (rows - 1) * *incy : y;
  product(rows, 1, depth, oriented(a, *lda, *trans), (View){from, *incx, 0}, (Target){to, *incy, 0, *alpha, *beta});
}

EXPORT float sdot_(const int *n, const float *x, const int *incx, const float *y, const int *incy) {
  float sum = 0.0f;
  if (*n <= 0) return sum;
  const float *a = *incx < 0 ? x - (int64_t)(*n - 1) * *incx : x, *b = *incy < 0 ? y - (int64_t)(*n - 1) * *incy : y;
  product(1, 1, *n, (View){a, 0, *incx}, (View){b, *incy, 0}, (Target){&sum, 1, 1, 1.0f, 0.0f});
  return sum;
}

#define PLAIN(T, S)                                                                                                    \
  EXPORT void S##axpy_(const int *n, const T *alpha, const T *x, const int *incx, T *y, const int *incy) {             \
    const int64_t dx = *incx, dy = *incy, x0 = dx < 0 ? (1 - *n) * dx : 0, y0 = dy < 0 ? (1 - *n) * dy : 0;             \
    for (int64_t i = 0; i < *n; i++) y[y0 + i * dy] += *alpha * x[x0 + i * dx];                                        \
  }                                                                                                                    \
  EXPORT void cblas_##S##axpy(int n, T alpha, const T *x, int incx, T *y, int incy) {                                  \
    S##axpy_(&n, &alpha, x, &incx, y, &incy);                                                                          \
  }                                                                                                                    \
  EXPORT void S##scal_(const int *n, const T *alpha, T *x, const int *incx) {                                          \
    for (int64_t i = 0; i < *n; i++) x[i * *incx] *= *alpha;                                                           \
  }
PLAIN(float, s)
PLAIN(double, d)

/* Double products are rare and small on every path: the same definition, an element at a time. */
static void product_double(int64_t m, int64_t n, int64_t depth, const double *a, int64_t ar, int64_t ac,
                           const double *b, int64_t br, int64_t bc, double *c, int64_t cr, int64_t cc, double alpha,
                           double beta) {
  for (int64_t j = 0; j < n; j++)
    for (int64_t i = 0; i < m; i++) {
      double *out = c + i * cr + j * cc, scale = beta;
      int64_t k = 0;
      do {
        double sum = 0.0;
        for (const int64_t end = least(k + CHUNK, alpha == 0.0 ? 0 : depth); k < end; k++)
          sum = __builtin_fma(a[i * ar + k * ac], b[k * br + j * bc], sum);
        *out = scale == 0.0 ? alpha * sum : alpha * sum + scale * *out;
        scale = 1.0;
      } while (alpha != 0.0 && k < depth);
    }
}

EXPORT void dgemm_(const char *ta, const char *tb, const int *m, const int *n, const int *k, const double *alpha,
                   const double *a, const int *lda, const double *b, const int *ldb, const double *beta, double *c,
                   const int *ldc) {
  const int plain_a = *ta == 'n' || *ta == 'N', plain_b = *tb == 'n' || *tb == 'N';
  product_double(*m, *n, *k, a, plain_a ? 1 : *lda, plain_a ? *lda : 1, b, plain_b ? 1 : *ldb, plain_b ? *ldb : 1, c,
                 1, *ldc, *alpha, *beta);
}

EXPORT void cblas_dgemm_batch(int layout, const int *ta, const int *tb, const int *m, const int *n, const int *k,
                              const double *alpha, const double **a, const int *lda, const double **b, const int *ldb,
                              const double *beta, double **c, const int *ldc, int groups, const int *sizes) {
  for (int g = 0, at = 0; g < groups; at += sizes[g++])
    for (int i = at; i < at + sizes[g]; i++) {
      const int same_a = (ta[g] == NO_TRANS) != (layout == ROW_MAJOR), same_b = (tb[g] == NO_TRANS) != (layout == ROW_MAJOR);
      product_double(m[g], n[g], k[g], a[i], same_a ? 1 : lda[g], same_a ? lda[g] : 1, b[i], same_b ? 1 : ldb[g],
                     same_b ? ldb[g] : 1, c[i], layout == ROW_MAJOR ? ldc[g] : 1, layout == ROW_MAJOR ? 1 : ldc[g],
                     alpha[g], beta[g]);
    }
}

EXPORT void dgemv_(const char *trans, const int *m, const int *n, const double *alpha, const double *a, const int *lda,
                   const double *x, const int *incx, const double *beta, double *y, const int *incy) {
  const int turned = *trans != 'n' && *trans != 'N';
  const int64_t rows = turned ? *n : *m, depth = turned ? *m : *n;
  const double *from = *incx < 0 ? x - (depth - 1) * *incx : x;
  double *to = *incy < 0 ? y - (rows - 1) * *incy : y;
  product_double(rows, 1, depth, a, turned ? *lda : 1, turned ? 1 : *lda, from, *incx, 0, to, *incy, 0, *alpha, *beta);
}

EXPORT double ddot_(const int *n, const double *x, const int *incx, const double *y, const int *incy) {
  double sum = 0.0;
  if (*n <= 0) return sum;
  const double *a = *incx < 0 ? x - (int64_t)(*n - 1) * *incx : x, *b = *incy < 0 ? y - (int64_t)(*n - 1) * *incy : y;
  product_double(1, 1, *n, a, 0, *incx, b, *incy, 0, &sum, 1, 1, 1.0, 0.0);
  return sum;
}

/* --------------------------------------------------------------------------------------- functions of one variable */

typedef __m256 (*Floats)(__m256);
typedef __m256d (*Doubles)(__m256d);

static void *sleef(const char *name) {
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), *found = torch ? dlsym(torch, name) : NULL;
  if (found == NULL) {
    fprintf(stderr, "rlinf_embodied: libtorch_cpu.so has no %s: use run.exact=exact with this torch\n", name);
    abort();
  }
  return found;
}

static void map_floats(Floats function, int64_t n, const float *x, float *y) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, function(_mm256_loadu_ps(x + i)));
  if (i < n) {
    float rest[8] = {0};
    memcpy(rest, x + i, (size_t)(n - i) * sizeof(float));
    _mm256_storeu_ps(rest, function(_mm256_loadu_ps(rest)));
    memcpy(y + i, rest, (size_t)(n - i) * sizeof(float));
  }
}

static void map_doubles(Doubles function, int64_t n, const double *x, double *y) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) _mm256_storeu_pd(y + i, function(_mm256_loadu_pd(x + i)));
  if (i < n) {
    double rest[4] = {0};
    memcpy(rest, x + i, (size_t)(n - i) * sizeof(double));
    _mm256_storeu_pd(rest, function(_mm256_loadu_pd(rest)));
    memcpy(y + i, rest, (size_t)(n - i) * sizeof(double));
  }
}

#define BOTH(NAME, FUNCTION, ULPS)                                                                                     \
  EXPORT void vms##NAME(int n, const float *x, float *y, int64_t mode) {                                               \
    static Floats function;                                                                                            \
    (void)mode;                                                                                                        \
    if (function == NULL) function = (Floats)sleef("Sleef_" FUNCTION "f8_" ULPS "avx2");                               \
    map_floats(function, n, x, y);                                                                                     \
  }                                                                                                                    \
  EXPORT void vmd##NAME(int n, const double *x, double *y, int64_t mode) {                                             \
    static Doubles function;                                                                                           \
    (void)mode;                                                                                                        \
    if (function == NULL) function = (Doubles)sleef("Sleef_" FUNCTION "d4_" ULPS "avx2");                              \
    map_doubles(function, n, x, y);                                                                                    \
  }
BOTH(Acos, "acos", "u10")
BOTH(Asin, "asin", "u10")
BOTH(Atan, "atan", "u10")
BOTH(Cos, "cos", "u10")
BOTH(Erf, "erf", "u10")
BOTH(Erfc, "erfc", "u15")
BOTH(Exp, "exp", "u10")
BOTH(Ln, "log", "u10")
BOTH(Log10, "log10", "u10")
BOTH(Log2, "log2", "u10")
BOTH(Sin, "sin", "u10")
BOTH(Tan, "tan", "u10")
BOTH(Tanh, "tanh", "u10")

EXPORT void vsLn(int n, const float *x, float *y) { vmsLn(n, x, y, 0); }
EXPORT void vdLn(int n, const double *x, double *y) { vmdLn(n, x, y, 0); }

static __m256 roots(__m256 x) { return _mm256_sqrt_ps(x); }
static __m256d double_roots(__m256d x) { return _mm256_sqrt_pd(x); }
EXPORT void vmsSqrt(int n, const float *x, float *y, int64_t mode) { (void)mode, map_floats(roots, n, x, y); }
EXPORT void vmdSqrt(int n, const double *x, double *y, int64_t mode) { (void)mode, map_doubles(double_roots, n, x, y); }

/* -------------------------------------------------------------------------------------- ways around the kernels above */

/* at::Context::userEnabledMkldnn() and userEnabledNNPACK(): convolutions and GELU go through ATen's own kernels. */
EXPORT _Bool _ZNK2at7Context17userEnabledMkldnnEv(const void *context) { return (void)context, 0; }
EXPORT _Bool _ZNK2at7Context17userEnabledNNPACKEv(const void *context) { return (void)context, 0; }
