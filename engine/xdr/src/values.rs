//! Basic types.

use crate::{BadXdr, Decode, Decoder, Encode, EncodeError, Encoder, padded};

macro_rules! number {
    ($($type:ty: $len:literal, $read:ident, $name:literal, |$word:ident| $value:expr, |$number:ident| $written:expr;)*) => {
        $(
            impl Decode<'_> for $type {
                #[inline]
                fn decode(from: &mut Decoder<'_>) -> Result<Self, BadXdr> {
                    from.$read($name).map(|$word| $value)
                }
            }

            impl Encode for $type {
                #[inline]
                fn encoded_len(&self) -> usize {
                    $len
                }

                #[inline]
                fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
                    let $number = *self;
                    to.$read($written)
                }
            }
        )*
    };
}

number! {
    u32: 4, u32, "unsigned int", |word| word, |number| number;
    i32: 4, u32, "int", |word| word.cast_signed(), |number| number.cast_unsigned();
    u64: 8, u64, "unsigned hyper", |word| word, |number| number;
    i64: 8, u64, "hyper", |word| word.cast_signed(), |number| number.cast_unsigned();
    f32: 4, u32, "float", |word| f32::from_bits(word), |number| number.to_bits();
    f64: 8, u64, "double", |word| f64::from_bits(word), |number| number.to_bits();
    bool: 4, bool, "bool", |word| word, |number| number;
}

/// `T *x`.
impl<'a, T: Decode<'a>> Decode<'a> for Option<T> {
    #[inline]
    fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr> {
        Ok(if from.bool("optional data")? { Some(T::decode(from)?) } else { None })
    }
}

impl<T: Encode> Encode for Option<T> {
    #[inline]
    fn encoded_len(&self) -> usize {
        4 + self.as_ref().map_or(0, Encode::encoded_len)
    }

    #[inline]
    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
        to.bool(self.is_some())?;
        self.as_ref().map_or(Ok(()), |value| value.encode(to))
    }
}

/// `T x[N]`.
impl<'a, T: Decode<'a>, const N: usize> Decode<'a> for [T; N] {
    fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr> {
        let mut first_error = None;
        let elements: [Option<T>; N] = std::array::from_fn(|_| match first_error {
            None => T::decode(from).map_err(|error| first_error = Some(error)).ok(),
            Some(_) => None,
        });
        match first_error {
            None => Ok(elements.map(|element| element.expect("an error would be in `first_error`"))),
            Some(error) => Err(error),
        }
    }
}

impl<T: Encode, const N: usize> Encode for [T; N] {
    fn encoded_len(&self) -> usize {
        self.iter().map(Encode::encoded_len).sum()
    }

    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
        self.iter().try_for_each(|element| element.encode(to))
    }
}

/// `opaque x[N]`.
impl<const N: usize> Decode<'_> for [u8; N] {
    #[inline]
    fn decode(from: &mut Decoder<'_>) -> Result<Self, BadXdr> {
        from.fixed("opaque")
    }
}

impl<const N: usize> Encode for [u8; N] {
    #[inline]
    fn encoded_len(&self) -> usize {
        padded(N)
    }

    #[inline]
    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
        to.fixed(self)
    }
}

/// The arguments of one procedure, in order (RFC 5531 §12).
macro_rules! tuples {
    ($($($name:ident $at:tt)*;)*) => {
        $(
            impl<'a, $($name: Decode<'a>),*> Decode<'a> for ($($name,)*) {
                #[inline]
                fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr> {
                    let _from = from;
                    Ok(($($name::decode(_from)?,)*))
                }
            }

            impl<$($name: Encode),*> Encode for ($($name,)*) {
                #[inline]
                fn encoded_len(&self) -> usize {
                    0 $(+ self.$at.encoded_len())*
                }

                #[inline]
                fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
                    let _to = to;
                    $(self.$at.encode(_to)?;)*
                    Ok(())
                }
            }
        )*
    };
}
tuples! {
    ; A 0 B 1; A 0 B 1 C 2; A 0 B 1 C 2 D 3; A 0 B 1 C 2 D 3 E 4; A 0 B 1 C 2 D 3 E 4 F 5;
    A 0 B 1 C 2 D 3 E 4 F 5 G 6; A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7; A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8;
    A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8 J 9; A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8 J 9 K 10;
    A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7 I 8 J 9 K 10 L 11;
}
