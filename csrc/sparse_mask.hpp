// A sparse attention mask (bankfull/state/mask.py) and the list of keys that one query sees under it.
#pragma once

#include <cstdint>

namespace bankfull {

struct SparseMask {
    int64_t window = 0;  // 0: no mask
    int64_t dilation = 1, stride = 0, globals = 0, columns = 0;
    bool aligned = false;

    bool given() const { return window > 0; }
};

// In order of their positions: the global tokens, those on the stride before the window, and the rest of the window.
struct VisibleKeys {
    int64_t fixed = 0, strided = 0, local = 0;      // numbers of keys
    int64_t origin = 0, apart = 1;                  // of the strided keys; with columns: columns before the first one
    int64_t own = 0, dilation = 1;                  // of the window's keys
    int64_t stride = 0, columns = 0;

    VisibleKeys(const SparseMask& mask, int64_t query) : dilation(mask.dilation), stride(mask.stride), columns(mask.columns) {
        const int64_t reach = (mask.window - 1) * mask.dilation;  // below 2^62: both are below 2^31
        const int64_t start = mask.aligned ? query / mask.window * mask.window : query > reach ? query - reach : 0;
        fixed = mask.globals < query + 1 ? mask.globals : query + 1;
        const int64_t first = start > mask.globals ? start : mask.globals;
        local = first <= query ? (query - first) / dilation + 1 : 0;
        own = query - (local - 1) * dilation;
        if (!stride) return;
        const int64_t begin = mask.globals < start ? mask.globals : start;
        if (columns) {
            origin = columns_before(begin);
            strided = columns_before(start) - origin;
            return;
        }
        strided = (query - begin) / stride - (query - start) / stride;
        origin = query - (query - begin) / stride * stride;
        apart = stride;
    }

    int64_t count() const { return fixed + strided + local; }

    // Position of the key at `index`; `run`: how many keys from there on are at consecutive positions.
    int64_t key(int64_t index, int64_t& run) const {
        if (index < fixed) {
            run = fixed - index;
            return index;
        }
        index -= fixed;
        if (index < strided) {
            if (!columns) {
                run = apart == 1 ? strided - index : 1;
                return origin + index * apart;
            }
            const int64_t column = origin + index, block = column / columns, within = column - block * columns;
            run = columns - within < strided - index ? columns - within : strided - index;
            return block * stride + stride - columns + within;
        }
        index -= strided;
        run = dilation == 1 ? local - index : 1;
        return own + index * dilation;
    }

  private:
    int64_t columns_before(int64_t position) const {
        const int64_t block = position / stride, rest = position - block * stride - (stride - columns);
        return block * columns + (rest > 0 ? rest : 0);
    }
};

}  // namespace bankfull
