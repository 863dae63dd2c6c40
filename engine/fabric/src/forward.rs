//! Forwarding of trait methods by wrappers of fabrics.

#![forbid(unsafe_code)]

/// Writes these methods of [`Fabric`](crate::Fabric) as calls of the inner fabric. `$each!(self, fabric => …)` leads to
/// it.
macro_rules! forward {
    ($each:ident($this:ident): $(
        $(#[$attribute:meta])*
        fn $name:ident(&$($receiver:ident)+ $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;
    )*) => {
        $(
            $(#[$attribute])*
            fn $name(&$($receiver)+ $(, $argument: $type)*) $(-> $result)? {
                $each!($this, fabric => fabric.$name($($argument),*))
            }
        )*
    };
}

pub(crate) use forward;
