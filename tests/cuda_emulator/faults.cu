// Kernels with one fault each, which the emulator must find, and right ones, which it must let
// pass. Run from test_cuda_emulator.py.
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace {

constexpr int kThreads = 64;

// Each thread takes its neighbour's value out of shared memory.
template <bool kBarrier>
__global__ void neighbour(const float* x, float* y) {
  __shared__ float s[kThreads];
  s[threadIdx.x] = x[threadIdx.x];
  if (kBarrier) __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x + 1) % kThreads];
}

// Shared memory is used a second time; the barrier before that is missing or not.
template <bool kBarrier>
__global__ void reuse(const float* x, float* y) {
  __shared__ float s[kThreads];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float a = s[(threadIdx.x + 1) % kThreads];
  if (kBarrier) __syncthreads();
  s[threadIdx.x] = a;
  __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x + 1) % kThreads];
}

__global__ void half_of_the_threads_at_a_barrier(const float*, float* y) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  y[threadIdx.x] = 0;
}

__global__ void early_return(const float*, float* y) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  y[threadIdx.x] = 0;
}

__global__ void two_barriers(const float*, float* y) {
  if (threadIdx.x < kThreads / 2)
    __syncthreads();
  else
    __syncthreads();
  y[threadIdx.x] = 0;
}

__global__ void shuffle_without_some_lanes(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) v += __shfl_down_sync(0xffffffffu, v, 8);
  y[threadIdx.x] = v;
}

__global__ void shuffle_of_a_lane_outside_of_the_mask(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) v += __shfl_down_sync(0x0000ffffu, v, 8);
  y[threadIdx.x] = v;
}

__global__ void different_shuffles(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x % 2 == 0)
    v += __shfl_down_sync(0xffffffffu, v, 1);
  else
    v += __shfl_xor_sync(0xffffffffu, v, 1);
  y[threadIdx.x] = v;
}

__global__ void read_past_the_end(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 1]; }
__global__ void read_before_the_start(const float* x, float* y) {
  y[threadIdx.x] = x[int(threadIdx.x) - 1];
}
__global__ void write_past_the_end(const float* x, float* y) {
  y[threadIdx.x + 1] = x[threadIdx.x];
}
__global__ void write_an_input(const float* x, float* y) {
  const_cast<float*>(x)[threadIdx.x] = y[threadIdx.x] = 1;
}
__global__ void read_an_output(const float*, float* y) { y[threadIdx.x] += 1; }

__global__ void atomic_past_the_end(const float* x, float* y) {
  if (threadIdx.x == kThreads - 1) atomicAdd(y + kThreads, x[0]);
}

__global__ void misaligned_vector(const float* x, float* y) {
  using V = fusedtrain::cuda::Vec<float>;
  V v;
  if (threadIdx.x == 0) v.load(x + 1);
  if (threadIdx.x == 0) v.store(y);
}
__global__ void vector_over_the_end(const float* x, float* y) {
  using V = fusedtrain::cuda::Vec<float>;
  V v;
  v.load(x);
  if (threadIdx.x == 0) v.store(y + kThreads);
}

__global__ void uninitialised_shared(const float*, float* y) {
  __shared__ float s[kThreads];
  if (threadIdx.x > 0) s[threadIdx.x] = 0;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}

__global__ void all_write_one(const float* x, float* y) { y[0] = x[threadIdx.x]; }
__global__ void blocks_write_one(const float* x, float* y) {
  if (threadIdx.x == 0) y[0] = x[blockIdx.x];
}
// One block reads what another wrote: nothing orders them within a launch.
__global__ void blocks_read_each_other(const float*, float* y) {
  if (blockIdx.x == 0) y[threadIdx.x] = 1;
  if (blockIdx.x == 1 && threadIdx.x == 0) y[kThreads - 1] = y[0];
}

__global__ void dynamic_shared(const float* x, float* y) {
  FT_DYNAMIC_SHARED(bytes);
  float* s = reinterpret_cast<float*>(bytes);
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x + 1) % kThreads];
}

__global__ void others_stack(const float* x, float* y) {
  __shared__ const float* p;
  float mine = x[threadIdx.x];
  if (threadIdx.x == 0) p = &mine;
  __syncthreads();
  y[threadIdx.x] = *const_cast<const volatile float*>(p) + mine;
}

// Seen by AddressSanitizer alone (`make sanitize`): to the emulator both are memory of the thread.
__global__ void shared_into_shared(const float* x, float* y) {
  __shared__ float s[kThreads];
  __shared__ float behind[kThreads];
  s[threadIdx.x] = behind[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const volatile float* p = s;
  y[threadIdx.x] = p[threadIdx.x + 1] + behind[kThreads - 1 - threadIdx.x];
}
__global__ void local_array(const float* x, float* y) {
  volatile float local[8];
  for (int i = 0; i < 8; ++i) local[i] = x[i];
  const volatile float* p = local;
  y[threadIdx.x] = p[8 + threadIdx.x / kThreads];
}

// Right: a block's sum by shuffles and shared memory, votes, atomics, a warp that synchronises
// alone.
__global__ void block_sums(const float* x, float* y) {
  __shared__ float scratch[kThreads / 32];
  const float sum = fusedtrain::cuda::block_sum<kThreads / 32>(x[threadIdx.x], scratch);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
__global__ void votes(const float* x, float* y) {
  const bool positive = x[threadIdx.x] > 0;
  const unsigned votes = __ballot_sync(0xffffffffu, positive);
  const bool any = __any_sync(0xffffffffu, positive), all = __all_sync(0xffffffffu, positive);
  y[threadIdx.x] =
      float(votes >> (threadIdx.x % 32) & 1) + (any ? 2.0f : 0.0f) + (all ? 4.0f : 0.0f);
}
__global__ void atomics(const float* x, float* y) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);
  __syncthreads();
  y[threadIdx.x] = sum;
}
template <bool kSync>
__global__ void warp_alone(const float* x, float* y) {
  __shared__ float s[kThreads];
  s[threadIdx.x] = x[threadIdx.x];
  if (kSync) __syncwarp();
  y[threadIdx.x] = s[threadIdx.x ^ 1];
}

// A warp reads a number before one of its lanes changes that number.
template <bool kSync>
__global__ void warp_reads_one(const float* x, float* y) {
  __shared__ float s[kThreads / 32];
  float& first = s[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) first = x[threadIdx.x];
  __syncwarp();
  y[threadIdx.x] = first;
  if (kSync) __syncwarp();
  if (threadIdx.x % 32 == 0) first = 0;
}

// Numbers that travel as an argument.
struct Numbers {
  float x[kThreads];
};
__global__ void argument(const Numbers __grid_constant__ numbers, const float*, float* y) {
  y[threadIdx.x] = numbers.x[kThreads - 1 - threadIdx.x];
}
__global__ void write_an_argument(const Numbers __grid_constant__ numbers, const float* x, float*) {
  const_cast<Numbers&>(numbers).x[threadIdx.x] = x[threadIdx.x];
}
__global__ void read_past_an_argument(const Numbers __grid_constant__ numbers, const float*,
                                      float* y) {
  y[threadIdx.x] = numbers.x[2 * kThreads + threadIdx.x];
}

struct Case {
  const char* name;
  void (*kernel)(const float*, float*);
  int blocks, threads;
  size_t dynamic_bytes;
  void (*with_numbers)(const Numbers __grid_constant__, const float*, float*) = nullptr;
};
#define FT_CASE(kernel) {#kernel, &kernel, 1, kThreads, 0}
#define FT_CASE_WITH_NUMBERS(kernel) {#kernel, nullptr, 1, kThreads, 0, &kernel}
const Case kCases[] = {
    FT_CASE(neighbour<false>),
    FT_CASE(neighbour<true>),
    FT_CASE(reuse<false>),
    FT_CASE(reuse<true>),
    FT_CASE(half_of_the_threads_at_a_barrier),
    FT_CASE(early_return),
    FT_CASE(two_barriers),
    FT_CASE(shuffle_without_some_lanes),
    FT_CASE(shuffle_of_a_lane_outside_of_the_mask),
    FT_CASE(different_shuffles),
    FT_CASE(read_past_the_end),
    FT_CASE(read_before_the_start),
    FT_CASE(write_past_the_end),
    FT_CASE(write_an_input),
    FT_CASE(read_an_output),
    FT_CASE(atomic_past_the_end),
    FT_CASE(misaligned_vector),
    FT_CASE(vector_over_the_end),
    FT_CASE(uninitialised_shared),
    FT_CASE(all_write_one),
    {"blocks_write_one", &blocks_write_one, 2, kThreads, 0},
    {"blocks_read_each_other", &blocks_read_each_other, 2, kThreads, 0},
    {"dynamic_shared", &dynamic_shared, 1, kThreads, kThreads * sizeof(float)},
    {"dynamic_shared too small", &dynamic_shared, 1, kThreads, kThreads * sizeof(float) - 4},
    FT_CASE(others_stack),
    FT_CASE(shared_into_shared),
    FT_CASE(local_array),
    {"too many threads", &read_an_output, 1, 1025, 0},
    {"no blocks", &read_an_output, 0, kThreads, 0},
    {"block_sums", &block_sums, 1, kThreads, 0},
    FT_CASE(votes),
    FT_CASE(atomics),
    FT_CASE(warp_alone<true>),
    FT_CASE(warp_alone<false>),
    FT_CASE(warp_reads_one<true>),
    FT_CASE(warp_reads_one<false>),
    FT_CASE_WITH_NUMBERS(argument),
    FT_CASE_WITH_NUMBERS(write_an_argument),
    FT_CASE_WITH_NUMBERS(read_past_an_argument),
};

}  // namespace

// Name of a case; null after the last.
extern "C" __attribute__((visibility("default"))) const char* fault_name(int i) {
  return size_t(i) < sizeof kCases / sizeof *kCases ? kCases[i].name : nullptr;
}

// Runs it over x and y of 64 numbers, which must be buffers of the emulator; what is thrown, or "".
extern "C" __attribute__((visibility("default"))) const char* fault_run(int i, const float* x,
                                                                        float* y) {
  static std::string message;
  const Case& c = kCases[i];
  Numbers numbers;
  for (int k = 0; k < kThreads; ++k) numbers.x[k] = float(k);
  using fusedtrain::cuda::launch;
  try {
    if (c.with_numbers != nullptr)
      launch(c.with_numbers, c.blocks, c.threads, nullptr, c.dynamic_bytes, numbers, x, y);
    else
      launch(c.kernel, c.blocks, c.threads, nullptr, c.dynamic_bytes, x, y);
    message.clear();
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  return message.c_str();
}
