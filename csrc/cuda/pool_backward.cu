// Backward of max pooling: an input looks at the windows that reach it. No atomics, and sums in the
// order of the outputs.
//
// For the usual windows a thread has a tile of neighbouring inputs: each output that reaches
// several of them is loaded once, and where each input lies in each window is known when the kernel
// is compiled.
#include "pool.cuh"

namespace fusedtrain {
namespace cuda {
namespace {

// The windows that reach an input, from the first one on.
template <class I>
struct Reached {
  Pixel<I> pixel;
  I h, w, first_h, first_w, last_h, last_w;

  __device__ __forceinline__ Reached(const MaxPoolBackward& call, const Image<I>& in, I at)
      : pixel(at, in) {
    const I stride_h = I(call.stride_h), stride_w = I(call.stride_w);
    h = pixel.row + I(call.pad_h);
    w = pixel.column + I(call.pad_w);
    // equal (- for + #1): windows that end before the input change nothing
    const I least_h = h - I(call.kernel_h) + 1, least_w = w - I(call.kernel_w) + 1;
    // equal (>= for >): equal sides have equal results
    first_h = least_h > 0 ? (least_h + stride_h - 1) / stride_h : 0;
    first_w = least_w > 0 ? (least_w + stride_w - 1) / stride_w : 0;
    const I end_h = h / stride_h + 1, end_w = w / stride_w + 1;
    last_h = end_h < I(call.out_height) ? end_h : I(call.out_height);
    last_w = end_w < I(call.out_width) ? end_w : I(call.out_width);
  }
  // The place of the input in window (o, q).
  __device__ __forceinline__ int place(const MaxPoolBackward& call, I o, I q) const {
    return int(h - o * I(call.stride_h)) * int(call.kernel_w) + int(w - q * I(call.stride_w));
  }
};

// Any windows: a thread has an input, or 16 bytes of channels.
template <class S, class I, bool kWide>
__global__ void __launch_bounds__(kPoolThreads, sizeof(I) == 8 ? 2 : 4)
    max_pool2d_backward_kernel(const MaxPoolBackward call, const Image<I> in, int64_t inputs) {
  using V = Vec<S, kWide>;
  using Word = typename BytesOf<V::kLanes>::Word;
  const int64_t at = (int64_t(blockIdx.x) * kPoolThreads + threadIdx.x) * V::kLanes;
  if (at >= inputs) return;
  const Reached<I> r(call, in, I(at));
  V sum = {};
  for (I o = r.first_h; o < r.last_h; ++o) {
    for (I q = r.first_w; q < r.last_w; ++q) {
      const I line = r.pixel.plane * I(call.out_height) + o;
      const I output = (line * I(call.out_width) + q) * I(call.channels) + r.pixel.channel;
      const Spot spot = spot_of(output, call.bits);
      const Word codes = *reinterpret_cast<const Word*>(call.codes + spot.byte);
      const int place = r.place(call, o, q);
      V g;
      g.load(static_cast<const S*>(call.grad) + output);
#pragma unroll
      for (int l = 0; l < V::kLanes; ++l)
        if ((int(codes >> (8 * l + spot.shift)) & ((1 << call.bits) - 1)) == place)
          sum.lane[l] += g.lane[l];
    }
  }
  sum.store(static_cast<S*>(call.grad_input) + at);
}

// Windows of one size and stride in both dimensions, known when the kernel is compiled. In an
// input's row or column that lies `at` elements behind the first of a tile, the input is at place
// at + kPad - i * kStride of window i; window 0 is the first one that begins in the tile, but for
// the padding.
template <int kWindow_, int kStride_, int kPad_>
struct Windows {
  static constexpr int kWindow = kWindow_, kStride = kStride_, kPad = kPad_;
  static constexpr int kBits = kWindow == 2 ? 2 : 4;
  static constexpr int kFirst = -((kWindow - 1 - kPad) / kStride);  // of those that reach a tile
  FT_METHOD static constexpr int count(int inputs) {
    return (inputs - 1 + kPad) / kStride + 1 - kFirst;
  }
  FT_METHOD static constexpr int place(int at, int i) { return at + kPad - i * kStride; }
  FT_METHOD static constexpr bool reaches(int at, int i) {
    return place(at, i) >= 0 && place(at, i) < kWindow;
  }
};

// Inputs of a thread: neighbours, so that an output that reaches several is loaded once. Rows of
// `kAcross` inputs are stored together; else channels are.
template <class S, class W, bool kAcross, bool kChannels>
struct Tile {
  static constexpr int kRows = kChannels ? 2 : (!kAcross ? 8 : (W::kStride == 1 ? 4 : 2));
  static constexpr int kColumns = kAcross ? Vec<S>::kLanes : 2;
};

// Tiles in memory order: of a plane's rows, of a row, and channels of a pixel in vectors.
struct Tiles {
  Divisor<int32_t> down, across, vectors;
  int32_t count;
};

// Blocks of a multiprocessor. Without the number (0) ptxas aims at 40 or 64 registers, and spilled
// some on sm_80 and sm_100.
template <class S, bool kAcross, bool kChannels>
constexpr int kBlocks = kChannels ? 0 : (!kAcross ? 4 : (sizeof(S) == 2 ? 2 : 0));

// A thread has a tile: kAcross, of rows that begin at multiples of 16 bytes, kChannels, of 16 bytes
// of channels, else of a plane.
template <class S, class W, bool kAcross, bool kChannels>
__global__ void __launch_bounds__(kPoolThreads, kBlocks<S, kAcross, kChannels>)
    max_pool2d_tiles_kernel(const MaxPoolBackward call, const Tiles tiles) {
  using V = Vec<S, kChannels>;
  using Word = typename BytesOf<V::kLanes>::Word;
  using T = typename V::T;
  using Size = Tile<S, W, kAcross, kChannels>;
  constexpr int kRows = Size::kRows, kColumns = Size::kColumns;
  constexpr int kDown = W::count(kRows), kRight = W::count(kColumns);
  constexpr Word kMask = Word(~Word(0)) / 255 * ((1 << W::kBits) - 1);
  int32_t rest = int32_t(blockIdx.x) * kPoolThreads + int32_t(threadIdx.x);
  if (rest >= tiles.count) return;
  const int32_t channels = kChannels ? int32_t(call.channels) : 1;
  const int32_t height = int32_t(call.height), width = int32_t(call.width);
  const int32_t out_height = int32_t(call.out_height), out_width = int32_t(call.out_width);
  const int32_t channel = kChannels ? tiles.vectors.digit(rest) * V::kLanes : 0;
  const int32_t column = tiles.across.digit(rest) * kColumns;
  const int32_t row = tiles.down.digit(rest) * kRows, plane = rest;

  Packed<S, kChannels> grad[kDown][kRight];
  Word codes[kDown][kRight];
#pragma unroll
  for (int i = 0; i < kDown; ++i)
#pragma unroll
    for (int j = 0; j < kRight; ++j) {
      const int32_t o = row / W::kStride + W::kFirst + i, q = column / W::kStride + W::kFirst + j;
      const bool exists = uint32_t(o) < uint32_t(out_height) && uint32_t(q) < uint32_t(out_width);
      const int32_t there = ((plane * out_height + o) * out_width + q) * channels + channel;
      // Another output where there is none: no branch stands between the loads.
      const uint32_t output = exists ? uint32_t(there) : 0;
      constexpr uint32_t kPart = block_bytes(W::kBits);
      const uint32_t byte = output / kBitBlock * kPart + output % kPart;
      const int shift = int(output / kPart % (8 / W::kBits)) * W::kBits;
      grad[i][j].load(static_cast<const S*>(call.grad) + output);
      const Word word = *reinterpret_cast<const Word*>(call.codes + byte);
      codes[i][j] = exists ? Word(word >> shift & kMask) : Word(~Word(0));  // no place
    }

  T sum[kRows][kColumns][V::kLanes] = {};
#pragma unroll
  for (int i = 0; i < kDown; ++i)
#pragma unroll
    for (int j = 0; j < kRight; ++j) {
      const V g = grad[i][j].get();
#pragma unroll
      for (int a = 0; a < kRows; ++a)
#pragma unroll
        for (int b = 0; b < kColumns; ++b) {
          const int down = W::kFirst + i, right = W::kFirst + j;
          if (!W::reaches(a, down) || !W::reaches(b, right)) continue;
          const int place = W::place(a, down) * W::kWindow + W::place(b, right);
#pragma unroll
          for (int l = 0; l < V::kLanes; ++l)
            if ((int(codes[i][j] >> 8 * l) & 255) == place) sum[a][b][l] += g.lane[l];
        }
    }

  S* const to = static_cast<S*>(call.grad_input);
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
    if (row + a >= height) break;
    const int32_t line = (plane * height + row + a) * width + column;
    if constexpr (kAcross) {
      Vec<S> vector;
#pragma unroll
      for (int b = 0; b < kColumns; ++b) vector.lane[b] = sum[a][b][0];
      vector.store(to + line);
    } else {
#pragma unroll
      for (int b = 0; b < kColumns; ++b) {
        if (column + b >= width) break;
        V vector;
#pragma unroll
        for (int l = 0; l < V::kLanes; ++l) vector.lane[l] = sum[a][b][l];
        vector.store(to + (line + b) * channels + channel);
      }
    }
  }
}

template <class S, class W, bool kAcross, bool kChannels>
void run_tiles(const MaxPoolBackward& call, void* stream) {
  using Size = Tile<S, W, kAcross, kChannels>;
  const int64_t down = ceil_div(call.height, Size::kRows);
  const int64_t across = ceil_div(call.width, Size::kColumns);
  const int64_t vectors = call.channels / Vec<S, kChannels>::kLanes;
  Tiles tiles;
  tiles.down = Divisor<int32_t>(down);
  tiles.across = Divisor<int32_t>(across);
  tiles.vectors = Divisor<int32_t>(vectors);
  tiles.count = int32_t(call.planes * down * across * vectors);
  launch(max_pool2d_tiles_kernel<S, W, kAcross, kChannels>, ceil_div(tiles.count, kPoolThreads),
         kPoolThreads, stream, 0, call, tiles);
}

// Whether tiles of these windows serve the call.
template <class W>
bool is_of(const MaxPoolBackward& call) {
  return call.kernel_h == W::kWindow && call.kernel_w == W::kWindow &&
         call.stride_h == W::kStride && call.stride_w == W::kStride && call.pad_h == W::kPad &&
         call.pad_w == W::kPad && call.bits == W::kBits;
}

// Calls f with the windows of the call; false where no tiles are compiled for them.
template <class F>
bool with_windows(const MaxPoolBackward& call, const F& f) {
  if (!is_small(call)) return false;
  if (is_of<Windows<2, 2, 0>>(call)) return f(Windows<2, 2, 0>()), true;
  if (is_of<Windows<3, 2, 0>>(call)) return f(Windows<3, 2, 0>()), true;
  if (is_of<Windows<3, 2, 1>>(call)) return f(Windows<3, 2, 1>()), true;
  if (is_of<Windows<3, 1, 1>>(call)) return f(Windows<3, 1, 1>()), true;
  return false;
}

template <class S, class I, bool kWide>
void run(const MaxPoolBackward& call, void* stream) {
  const int64_t inputs = call.inputs();
  const Image<I> in(call.height, call.width, call.channels);
  launch(max_pool2d_backward_kernel<S, I, kWide>,
         ceil_div(inputs / Vec<S, kWide>::kLanes, kPoolThreads), kPoolThreads, stream, 0, call, in,
         inputs);
}

}  // namespace

void compute(const MaxPoolBackward& call, void* stream) {
  if (call.inputs() == 0) return;
  by_dtype(call.dtype, [&](auto* null) {
    using S = std::remove_pointer_t<decltype(null)>;
    const char *grad = static_cast<const char*>(call.grad),
               *to = static_cast<const char*>(call.grad_input);
    const bool wide = is_wide<S>(call, grad, to, call.codes);
    const bool planes = call.channels == 1;
    // equal (never #1): the speed alone changes
    const bool across = planes && call.width % Vec<S>::kLanes == 0 && aligned(to);
    if (sizeof(S) < 8 && (wide || planes) && with_windows(call, [&](auto windows) {
          using W = decltype(windows);
          if constexpr (sizeof(S) == 8)
            return;  // right rather than fast
          else if (wide)
            run_tiles<S, W, false, true>(call, stream);
          else if (across)
            run_tiles<S, W, true, false>(call, stream);
          else
            run_tiles<S, W, false, false>(call, stream);
        }))
      return;
    if (is_small(call))
      wide ? run<S, int32_t, true>(call, stream) : run<S, int32_t, false>(call, stream);
    else
      wide ? run<S, int64_t, true>(call, stream) : run<S, int64_t, false>(call, stream);
  });
}

}  // namespace cuda
}  // namespace fusedtrain
