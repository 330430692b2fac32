package inbox

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// FuzzEncodeProduced: what a handler returns is what is sent again, byte for byte, and an older version of this
// module refuses what a newer one has stored.
func FuzzEncodeProduced(f *testing.F) {
	f.Add("events", "event-1", "key", "value", []byte(`{"id":1}`), byte(2))
	f.Add("events", "", "", "", []byte(nil), byte(0))
	f.Add("e", "a\x00b", "\xff\xfe", "\xed\xa0\x80", []byte{}, byte(255))
	f.Add("日本語", "\xff", "\"</script>\u2028", "\\u0000", []byte{0xff, 0}, byte(10))
	f.Add("\xff", strings.Repeat("x", 300), strings.Repeat("k", 300), strings.Repeat("v", 300), bytes.Repeat([]byte{0}, 300), byte(1))
	f.Add("events", "same", "same", "same", []byte("same"), byte(3))

	f.Fuzz(func(t *testing.T, consumer, uuid, field, value string, payload []byte, version byte) {
		first := message.NewMessage(uuid, payload)
		for i, metadata := range []string{field, value, uuid, consumer} {
			first.Metadata.Set(metadata, fmt.Sprint(i)+value)
		}
		second := message.NewMessage(value, nil)
		second.Metadata = nil
		third := message.NewMessage(uuid, []byte{})
		third.Metadata.Set(field, value)
		sent := nameProduced(Key{Consumer: consumer, MessageID: uuid}, []*message.Message{first, second, third})
		if first.UUID != uuid || second.UUID != value {
			t.Fatal("naming has changed the handler's own messages")
		}

		encoded := encodeProduced(sent)
		if again := encodeProduced(sent); !bytes.Equal(encoded, again) {
			t.Fatalf("encoded as %q and as %q", encoded, again)
		}
		wantSame(t, encoded, sent)

		other := append([]byte{version}, encoded[1:]...)
		if _, err := decodeProduced(other); version != producedVersion && !errors.Is(err, ErrStoredMessages) {
			t.Fatalf("version %d was read: %v", version, err)
		}
		// What is added keeps the version.
		added := []byte{producedVersion}
		for r := (storedReader{rest: encoded[1:]}); len(r.rest) > 0; {
			one := r.text()
			added = binary.AppendUvarint(added, uint64(len(one)+len(payload)))
			added = append(append(added, one...), payload...)
		}
		wantSame(t, added, sent)
	})
}

// FuzzDecodeProduced: whatever a record holds is refused, or is messages that can be sent, and stored again.
func FuzzDecodeProduced(f *testing.F) {
	golden := encodeProduced([]*message.Message{
		{UUID: "e", Metadata: message.Metadata{"a": "b", "b": "\xff"}, Payload: []byte("x")}, {UUID: "f"},
	})
	for at := range len(golden) + 1 {
		f.Add(golden[:at])
	}
	for at := range golden {
		for _, other := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			f.Add(append(append(append([]byte{}, golden[:at]...), other), golden[at+1:]...))
		}
	}
	f.Add(append([]byte{producedVersion}, bytes.Repeat([]byte{0xff}, 20)...))
	f.Add([]byte("\x01\x02\x00\xff\xff\xff\xff\xff\xff\xff\xff\x7f")) // lengths beyond any memory

	f.Fuzz(func(t *testing.T, encoded []byte) {
		messages, err := decodeProduced(encoded)
		if err != nil {
			if !errors.Is(err, ErrStoredMessages) || messages != nil {
				t.Fatalf("%d messages, %v", len(messages), err)
			}
			return
		}
		// Nothing is stored without these, so a record without them is damaged, and must not pass for sent.
		if encoded[0] != producedVersion || len(messages) == 0 {
			t.Fatalf("read version %d with %d messages", encoded[0], len(messages))
		}
		for _, msg := range messages {
			if msg.UUID == "" {
				t.Fatal("read a message without a UUID")
			}
		}
		wantSame(t, encodeProduced(messages), messages)
	})
}

// wantSame fails the test unless the encoded messages are these.
func wantSame(t *testing.T, encoded []byte, messages []*message.Message) {
	t.Helper()
	got, err := decodeProduced(encoded)
	if err != nil || len(got) != len(messages) {
		t.Fatalf("%d messages became %d: %v", len(messages), len(got), err)
	}
	for i, msg := range messages {
		if !got[i].Equals(msg) {
			t.Fatalf("message %q %q %q became %q %q %q", msg.UUID, msg.Metadata, msg.Payload, got[i].UUID, got[i].Metadata, got[i].Payload)
		}
	}
}
