//! Records as bytes: numbers little-endian, lists and texts behind a `u32` of their length.

/// Writes a record.
#[derive(Default)]
pub(crate) struct Encoder(pub(crate) Vec<u8>);

impl Encoder {
    pub(crate) fn u8(&mut self, x: u8) -> &mut Self {
        self.0.push(x);
        self
    }

    pub(crate) fn u64(&mut self, x: u64) -> &mut Self {
        self.0.extend(x.to_le_bytes());
        self
    }

    pub(crate) fn f64(&mut self, x: f64) -> &mut Self {
        self.u64(x.to_bits())
    }

    pub(crate) fn list<T: bytemuck::Pod>(&mut self, list: &[T]) -> &mut Self {
        self.0.extend((list.len() as u32).to_le_bytes());
        self.0.extend(bytemuck::cast_slice::<T, u8>(list));
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.list(text.as_bytes())
    }
}

/// Reads a record; what is missing or left over is an error.
pub(crate) struct Decoder<'a>(pub(crate) &'a [u8]);

impl<'a> Decoder<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self.0.split_at_checked(n).ok_or("a record is too short")?;
        self.0 = rest;
        Ok(head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn u64(&mut self) -> Result<u64, String> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn f64(&mut self) -> Result<f64, String> {
        Ok(f64::from_bits(self.u64()?))
    }

    pub(crate) fn list<T: bytemuck::Pod>(&mut self) -> Result<Vec<T>, String> {
        let mut n = [0; 4];
        n.copy_from_slice(self.take(4)?);
        let n = (u32::from_le_bytes(n) as usize)
            .checked_mul(size_of::<T>())
            .ok_or("a list is too long")?;
        Ok(bytemuck::pod_collect_to_vec(self.take(n)?))
    }

    pub(crate) fn text(&mut self) -> Result<String, String> {
        String::from_utf8(self.list()?).map_err(|_| "a text is not UTF-8".into())
    }

    pub(crate) fn end(self) -> Result<(), String> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err("a record is too long".into())
        }
    }
}
