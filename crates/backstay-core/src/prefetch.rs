//! A hint to the processor that memory will be read soon. The only place in the core
//! that needs `unsafe`; on other processors it does nothing.

/// Ask for the cache line at the start of `data`. Never changes a result.
#[inline(always)]
pub fn prefetch<T>(data: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: prefetching is a hint; it cannot fault, whatever the address, and the
        // pointer comes from a live slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = data;
}
