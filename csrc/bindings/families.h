// The bindings of every family. Each header registers its ops for the backend of the file that
// includes this one, behind its `Backend`, FT_LIBRARY and FT_KEY (library, dispatch key).
//
// A Backend is made for one call, on the device of a tensor, and has prepared() for fresh outputs,
// on_device(), run() of every call of ops/, and what batch_norm.h and optimizers.h name.
#pragma once

#include "activations.h"
#include "batch_norm.h"
#include "bias_act.h"
#include "channelwise.h"
#include "depthwise.h"
#include "few_bit.h"
#include "fold.h"
#include "gated.h"
#include "group_norm.h"
#include "images.h"
#include "optimizers.h"
#include "pool.h"
#include "row_norm.h"
#include "scale_add.h"
