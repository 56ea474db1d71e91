/* Closed-loop inverse kinematics (CLIK) of many rows of one serial chain, a row per SIMD lane.
 *
 * The iteration is that of SAPIEN's PinocchioModel.compute_inverse_kinematics, all in double precision:
 *     M = joint(q)^-1 target,  e = log6(M),  stop if |e| < eps,  q += dt K^T (K K^T + damp)^-1 e,
 *     K = Jlog6(M^-1) J, with J the Jacobian of the last joint in its own frame, zero for joints that are held.
 * Here all of it is written in the axes of the base, which turns e and K but changes neither |e| nor q.
 *
 * Sums are formed in another order than in SAPIEN, so the last bits of q differ.  Each row therefore carries a bound of
 * that difference, and is reported as UNSURE if a float32 result or its success could hang on it.
 *
 * Only IEEE additions, products, quotients and square roots are used, and never a fused operation, so that a row's bits
 * depend neither on the instruction set nor on the rows beside it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 8
#elif defined(__AVX__)
#define LANES 4
#else
#define LANES 2
#endif
#define MAX_JOINTS 16
#define MAX_ANGLE 1000.     /* rad; sine_cosine is accurate up to there */
#define GROWTH 0.5          /* of an error in q, per path length of q over distance to a singular configuration */
#define SAFETY 10.          /* margin / doubt; differences from SAPIEN were below 0.1 doubt in 225,000 cases */
#define MAX_DOUBT 1e-9      /* rad; beyond it, errors need not grow in proportion */
#define EACH_LANE for (int i = 0; i < LANES; i++)
#define INLINE static inline __attribute__((always_inline))

typedef double real __attribute__((vector_size(8 * LANES)));
typedef int64_t mask __attribute__((vector_size(8 * LANES))); /* -1 or 0, as comparisons give */

enum { FAILED = 0, SOLVED = 1, UNSURE = 2 };
enum { REVOLUTE = 0, CONTINUOUS = 1, PRISMATIC = 2 };

/* Joint j turns about, or slides along, the z axis of its frame. */
typedef struct {
    int32_t num_joints, max_iterations;
    double eps, dt, damp;
    double rounding;                 /* of q in an iteration, in units of 2^-52 */
    int32_t kind[MAX_JOINTS];
    int32_t source[MAX_JOINTS];      /* column of qpos */
    int32_t slot[MAX_JOINTS];        /* column of targets, -1: the joint is held */
    double rotation[MAX_JOINTS][9];  /* of the joint's frame in that of the joint before it, row by row */
    double offset[MAX_JOINTS][3];
    double tool_rotation[9];         /* of the last joint's frame in that of the link whose pose is given */
    double tool_offset[3];
} Chain;

typedef struct {
    real r[9], p[3];
} Frame;

/* log6(M) and Jlog6(M^-1) = [turn, lift turn; 0, turn]; noise: of error and lift, in units of 2^-52. */
typedef struct {
    real error[6], turn[9], lift[9], noise[2];
} Log;

/* The rows under way; row[i] < 0: lane i is empty. */
typedef struct {
    int64_t row[LANES];
    real q[MAX_JOINTS], doubt, count;
    Frame target;
    mask odd; /* too near a branch of a formula */
} Lanes;

INLINE real all(double x) { return (real){} + x; }
INLINE real pick(mask m, real a, real b) { return (real)((m & (mask)a) | (~m & (mask)b)); }
INLINE real root(real x) {
    EACH_LANE x[i] = sqrt(x[i]);
    return x;
}
INLINE int any(mask m) {
    int64_t found = 0;
    EACH_LANE found |= m[i];
    return found != 0;
}

INLINE real dot(const real a[3], const real b[3]) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }
INLINE void cross(const real a[3], const real b[3], real out[3]) {
    out[0] = a[1] * b[2] - a[2] * b[1], out[1] = a[2] * b[0] - a[0] * b[2], out[2] = a[0] * b[1] - a[1] * b[0];
}
INLINE void transform(const real m[9], const real x[3], real out[3]) {
    for (int a = 0; a < 3; a++) out[a] = dot(m + 3 * a, x);
}

/* Adds diagonal * identity + half the cross product matrix of v. */
INLINE void add_cross(real m[9], const real v[3], real diagonal) {
    m[0] += diagonal, m[4] += diagonal, m[8] += diagonal;
    m[1] -= 0.5 * v[2], m[2] += 0.5 * v[1], m[5] -= 0.5 * v[0];
    m[3] += 0.5 * v[2], m[6] -= 0.5 * v[1], m[7] += 0.5 * v[0];
}

/* x modulo pi/2, with pi/2 in three parts, then Taylor's series up to pi/4. */
INLINE void sine_cosine(real x, real *sine, real *cosine) {
    const double whole = 0x1.8p52; /* adding it leaves the nearest integer in the low bits */
    real shifted = x * 0x1.45f306dc9c883p-1 + whole, n = shifted - whole;
    real y = ((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a6p-34) - n * 0x1.3198a2e037073p-69, z = y * y;
    mask quadrant = (mask)shifted, odd = -(quadrant & 1);
    real s = all(1. / 355687428096000.), c = all(1. / 20922789888000.);
    s = s * z - 1. / 1307674368000., c = c * z - 1. / 87178291200.;
    s = s * z + 1. / 6227020800., c = c * z + 1. / 479001600.;
    s = s * z - 1. / 39916800., c = c * z - 1. / 3628800.;
    s = s * z + 1. / 362880., c = c * z + 1. / 40320.;
    s = s * z - 1. / 5040., c = c * z - 1. / 720.;
    s = s * z + 1. / 120., c = c * z + 1. / 24.;
    s = s * z - 1. / 6.;
    s = y + y * (z * s), c = 1. - (0.5 * z - z * z * c);
    *sine = (real)((mask)pick(odd, c, s) ^ ((quadrant & 2) << 62));
    *cosine = (real)((mask)pick(odd, s, c) ^ (((quadrant + 1) & 2) << 62));
}

/* theta / sin(theta) for cos(theta) >= -0.5: of half the angle, by interpolation in 1 - cos at 14 Chebyshev points. */
INLINE real angle_over_sine(real cosine) {
    static const double terms[] = {
        9.195087903114487e-05, -0.000132157752596636, 0.00023105799880840196, 1.4743017805349805e-05,
        0.0003126151535212897, 0.000539566898913318, 0.0011731553423059266, 0.002485954425869126,
        0.00532804927222027, 0.011544008764042558, 0.02539682550179677, 0.05714285714079507,
        0.13333333333334924, 0.3333333333333333,
    };
    real half = root(0.5 + 0.5 * cosine), u = 0.5 * (1. - cosine) / (1. + half), sum = all(terms[0]);
    for (int k = 1; k < 14; k++) sum = sum * u + terms[k];
    return (1. + u * sum) / half;
}

/* Moves `frame` on to joint j at value q. */
INLINE void advance(const Chain *chain, int j, real q, Frame *frame) {
    const double *r = chain->rotation[j], *t = chain->offset[j];
    real s, c, x, y;
    for (int a = 0; a < 3; a++) {
        real *row = frame->r + 3 * a, old[3] = {row[0], row[1], row[2]};
        frame->p[a] += old[0] * t[0] + old[1] * t[1] + old[2] * t[2];
        for (int b = 0; b < 3; b++) row[b] = old[0] * r[b] + old[1] * r[3 + b] + old[2] * r[6 + b];
    }
    if (chain->kind[j] == PRISMATIC) {
        for (int a = 0; a < 3; a++) frame->p[a] += frame->r[3 * a + 2] * q;
        return;
    }
    sine_cosine(q, &s, &c);
    for (int a = 0; a < 3; a++) {
        x = frame->r[3 * a], y = frame->r[3 * a + 1];
        frame->r[3 * a] = x * c + y * s, frame->r[3 * a + 1] = y * c - x * s;
    }
}

/* The formulas are pinocchio's, which take the angle from the trace of M: quaternions from float32 are not quite of unit
 * length, so M is not quite a rotation, and formulas that are equal for rotations would differ. */
INLINE void logarithm(const Frame *target, const Frame *frame, Log *log, mask *odd) {
    const double tiny = 0x1p-27; /* 1 - cos of 2^-13 rad, where pinocchio changes over to series */
    real m[9], p[3], w[3], wxp[3], back[3];
    for (int a = 0; a < 3; a++) p[a] = target->p[a] - frame->p[a];
    for (int a = 0; a < 9; a++) m[a] = dot(target->r + a / 3 * 3, frame->r + a % 3 * 3);
    real cosine = 0.5 * (m[0] + m[4] + m[8] - 1.);
    cosine = pick(cosine < 1., cosine, all(1.));
    real u = 1. - cosine, ratio = angle_over_sine(cosine);
    mask near = u < tiny;
    *odd |= ((u > tiny * (1 - 1e-6)) & (u < tiny * (1 + 1e-6))) | ~(cosine > -0.4);
    real t2 = pick(near, 2. * u, ratio * ratio * u * (1. + cosine)); /* the angle's square */
    real a = pick(near, 1. - t2 * (1. / 12.), 0.5 * ratio * (1. + cosine));
    real b = pick(near, all(1. / 12.), (1. - a) / t2);
    real slope = pick(near, all(1. / 360.), ((1. + 1. / ratio) * 0.5 / u - 2. / t2) / t2); /* b'(t) / t */
    real half = pick(near, all(0.5), 0.5 * ratio);
    w[0] = half * (m[7] - m[5]), w[1] = half * (m[2] - m[6]), w[2] = half * (m[3] - m[1]);
    cross(w, p, wxp);
    real along = b * dot(w, p);
    for (int k = 0; k < 3; k++) log->error[k] = a * p[k] - 0.5 * wxp[k] + along * w[k], log->error[3 + k] = w[k];

    real size = dot(w, w) / t2, reach = root(dot(p, p));
    log->noise[0] = pick(near, all(0), size * reach);
    log->noise[1] = pick(near, all(0), root(dot(w, w)) * reach * (1. + size) / t2);

    for (int k = 0; k < 3; k++) back[k] = -(m[k] * p[0] + m[3 + k] * p[1] + m[6 + k] * p[2]), w[k] = -w[k];
    real across = dot(w, back), c = t2 * slope + 2. * b;
    for (int k = 0; k < 9; k++) {
        log->turn[k] = b * w[k / 3] * w[k % 3];
        log->lift[k] = (slope * across * w[k / 3] - c * back[k / 3]) * w[k % 3] + b * w[k / 3] * back[k % 3];
    }
    add_cross(log->turn, w, a);
    add_cross(log->lift, back, across * b);
}

/* Column of K for a joint with this axis at this place, the end being at `end`. */
INLINE void jacobian_column(int kind, const real axis[3], const real place[3], const real end[3], const Log *log,
                            real column[6]) {
    real arm[3], moved[3], lifted[3];
    if (kind == PRISMATIC) {
        transform(log->turn, axis, column);
        for (int a = 0; a < 3; a++) column[3 + a] = all(0);
        return;
    }
    for (int a = 0; a < 3; a++) arm[a] = end[a] - place[a];
    cross(axis, arm, moved);
    transform(log->turn, axis, column + 3);
    transform(log->turn, moved, column);
    transform(log->lift, column + 3, lifted);
    for (int a = 0; a < 3; a++) column[a] += lifted[a];
}

/* Solves a x = b for positive definite a (lower half, overwritten) in place of b; returns the trace of a^-1. */
INLINE real solve(real a[6][6], real x[6]) {
    real inverse[6], column[6], trace = all(0);
    for (int k = 0; k < 6; k++) {
        inverse[k] = 1. / a[k][k];
        for (int i = k + 1; i < 6; i++) {
            real factor = a[i][k] * inverse[k];
            for (int j = i; j < 6; j++) a[j][i] -= factor * a[j][k];
            x[i] -= factor * x[k], a[k][i] = factor;
        }
    }
    for (int i = 0; i < 6; i++) { /* a = L D L^T, and this is column i of L^-1 */
        trace += inverse[i];
        for (int k = i + 1; k < 6; k++) {
            column[k] = -a[i][k];
            for (int j = i + 1; j < k; j++) column[k] -= a[j][k] * column[j];
            trace += column[k] * column[k] * inverse[k];
        }
    }
    for (int k = 5; k >= 0; k--) {
        x[k] *= inverse[k];
        for (int i = k + 1; i < 6; i++) x[k] -= a[k][i] * x[i];
    }
    return trace;
}

/* Moves q by one iteration; returns |e| before it. */
INLINE real iterate(const Chain *chain, Lanes *lanes) {
    real axis[MAX_JOINTS][3], place[MAX_JOINTS][3], columns[MAX_JOINTS][6], gram[6][6], norm = all(0), speed = all(0);
    Frame frame = {.r = {all(1), all(0), all(0), all(0), all(1), all(0), all(0), all(0), all(1)}};
    Log log;
    for (int j = 0; j < chain->num_joints; j++) {
        advance(chain, j, lanes->q[j], &frame);
        for (int a = 0; a < 3; a++) axis[j][a] = frame.r[3 * a + 2], place[j][a] = frame.p[a];
    }
    logarithm(&lanes->target, &frame, &log, &lanes->odd);
    for (int a = 0; a < 6; a++) norm += log.error[a] * log.error[a];
    for (int a = 0; a < 6; a++)
        for (int b = 0; b <= a; b++) gram[a][b] = all(a == b ? chain->damp : 0.);
    for (int j = 0; j < chain->num_joints; j++) {
        if (chain->slot[j] < 0) continue;
        jacobian_column(chain->kind[j], axis[j], place[j], frame.p, &log, columns[j]);
        for (int a = 0; a < 6; a++)
            for (int b = 0; b <= a; b++) gram[a][b] += columns[j][a] * columns[j][b];
    }
    real softness = root(solve(gram, log.error)); /* at least 1 / the smallest singular value of K */
    for (int j = 0; j < chain->num_joints; j++) {
        if (chain->slot[j] < 0) continue;
        real v = all(0);
        for (int a = 0; a < 6; a++) v += columns[j][a] * log.error[a];
        lanes->q[j] += v * chain->dt, speed += v * v;
    }
    /* An error in q grows with the change of K^+ along the way; rounding adds that of q, of e, and of the solution. */
    real moved = chain->dt * root(speed), grown = lanes->doubt * (GROWTH * moved * softness);
    real rounded = chain->dt * (1. + log.noise[0]) + moved * (softness + log.noise[1]);
    lanes->doubt += grown + 0x1p-52 * (chain->rounding + softness * rounded);
    return root(norm);
}

/* Puts a row into lane i: its start, and its target, with Eigen's matrix of the pose (x, y, z, qw, qx, qy, qz). */
static void load(const Chain *chain, Lanes *lanes, int i, int64_t row, const float *qpos, const float *pose) {
    double w = pose[3], x = pose[4], y = pose[5], z = pose[6], entry, place;
    double r[9] = {1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
                   2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                   2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)};
    lanes->row[i] = row, lanes->odd[i] = 0, lanes->doubt[i] = lanes->count[i] = 0;
    for (int j = 0; j < chain->num_joints; j++) {
        lanes->q[j][i] = qpos[chain->source[j]];
        if (!(fabs(lanes->q[j][i]) < MAX_ANGLE)) lanes->odd[i] = -1;
    }
    for (int a = 0; a < 3; a++) {
        place = pose[a];
        for (int b = 0; b < 3; b++) {
            entry = 0;
            for (int k = 0; k < 3; k++) entry += r[3 * a + k] * chain->tool_rotation[3 * k + b];
            lanes->target.r[3 * a + b][i] = entry;
            place += r[3 * a + b] * chain->tool_offset[b];
        }
        lanes->target.p[a][i] = place;
    }
}

/* SAPIEN returns continuous joints within (-pi, pi]; 0: too near an end of it. */
static int wrap(double *value) {
    const double turn = 0x1.921fb54442d18p+2;
    *value -= turn * nearbyint(*value / turn);
    return fabs(*value) < 0.5 * turn - 1e-6;
}

/* Writes the targets of a solved row, if each is the same float32 within `margin`. */
static int store(const Chain *chain, double *values, double margin, float *targets) {
    float rounded[MAX_JOINTS];
    for (int j = 0; j < chain->num_joints; j++) {
        if (chain->kind[j] == CONTINUOUS && !wrap(values + j)) return UNSURE;
        rounded[j] = (float)(values[j] - margin);
        if (chain->slot[j] >= 0 && rounded[j] != (float)(values[j] + margin)) return UNSURE;
    }
    for (int j = 0; j < chain->num_joints; j++)
        if (chain->slot[j] >= 0) targets[chain->slot[j]] = rounded[j];
    return SOLVED;
}

/* Solves `rows`, which are indices into qpos [*, num_qpos], poses [*, 7] and targets [*, num_targets], from qpos.
 *
 * Targets are written in solved rows only.  values [num_rows, num_joints], margins and status [num_rows] are written in
 * the order of `rows`. */
void clik_solve(const Chain *chain, const int64_t *rows, int64_t num_rows, const float *qpos, int64_t num_qpos,
                const float *poses, float *targets, int64_t num_targets, double *values, double *margins,
                uint8_t *status) {
    int64_t next = 0, open = 0;
    real before[MAX_JOINTS], margin, norm, band;
    mask done = (mask){} - 1, solved;
    Lanes lanes;
    memset(&lanes, 0, sizeof lanes);
    EACH_LANE lanes.row[i] = -1;
    for (;;) {
        EACH_LANE if (done[i] && next < num_rows) {
            load(chain, &lanes, i, next, qpos + rows[next] * num_qpos, poses + 7 * rows[next]);
            next++, open++;
        }
        if (!open) return;
        do {
            memcpy(before, lanes.q, sizeof before);
            margin = SAFETY * lanes.doubt;
            norm = iterate(chain, &lanes);
            solved = norm < chain->eps;
            band = chain->eps * 1e-8 + 8. * margin; /* |e| moves by less than 8 rad^-1 per change of q */
            lanes.odd |= ((norm > chain->eps - band) & (norm < chain->eps + band)) | ~(margin < SAFETY * MAX_DOUBT);
            done = solved | lanes.odd | (lanes.count >= (double)chain->max_iterations) | (norm != norm);
            lanes.count += 1.;
        } while (!any(done));
        EACH_LANE if (done[i] && lanes.row[i] >= 0) {
            int64_t row = lanes.row[i];
            double *found = values + row * chain->num_joints;
            for (int j = 0; j < chain->num_joints; j++) found[j] = before[j][i];
            margins[row] = margin[i];
            status[row] = lanes.odd[i] || norm[i] != norm[i] ? UNSURE : FAILED;
            if (status[row] == FAILED && solved[i])
                status[row] = store(chain, found, margin[i], targets + rows[row] * num_targets);
            lanes.row[i] = -1, open--;
        }
    }
}
