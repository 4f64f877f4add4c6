// The bindings of every family: what cpu.cpp and cuda.cpp register for their backend.
#pragma once

#include "activations.h"
#include "batch_norm.h"
#include "bias_act.h"
#include "channelwise.h"
#include "depthwise.h"
#include "few_bit.h"
#include "fold.h"
#include "gated.h"
#include "images.h"
#include "optimizers.h"
#include "pool.h"
#include "scale_add.h"

#define FT_IMPLEMENT_FAMILIES(Backend)                 \
  using Pointwise = Activations<Backend>;              \
  using Channelwise = ChannelwiseActivations<Backend>; \
  FT_POINTWISE(FT_IMPLEMENT_POINTWISE)                 \
  FT_CHANNELWISE(FT_IMPLEMENT_CHANNELWISE)             \
  FT_IMPLEMENT_BATCH_NORM(Backend)                     \
  FT_IMPLEMENT_OPTIMIZERS(Backend)                     \
  FT_IMPLEMENT_FOLD(Backend)                           \
  FT_IMPLEMENT_GATED(Backend)                          \
  FT_IMPLEMENT_SCALE_ADD(Backend)                      \
  FT_IMPLEMENT_BIAS_ACT(Backend)                       \
  FT_IMPLEMENT_FEW_BIT(Backend)                        \
  FT_IMPLEMENT_IMAGES(Backend)                         \
  FT_IMPLEMENT_POOL(Backend)                           \
  FT_IMPLEMENT_DEPTHWISE(Backend)
