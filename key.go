package inbox

import (
	"cmp"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// maxKeyBytes is the longest consumer name and the longest message id, in bytes.
// It is the length of an AMQP short string, and far below what a btree index of any supported
// database refuses.
const maxKeyBytes = 255

// Key names one record of the inbox: one message as seen by one consumer.
// Two consumers that share a table never see each other's records.
type Key struct {
	// Consumer is the name under which the handler claims messages, see [Options.Consumer].
	Consumer string

	// MessageID identifies the message, see [Options.MessageID].
	MessageID string
}

// String returns the key for logs, quoted, so that unprintable bytes are seen.
func (k Key) String() string {
	return fmt.Sprintf("%q/%q", k.Consumer, k.MessageID)
}

// Compare is the order of keys, first by the consumer and then by the message id, each byte by byte: -1, 0 or +1.
func (k Key) Compare(other Key) int {
	return cmp.Or(strings.Compare(k.Consumer, other.Consumer), strings.Compare(k.MessageID, other.MessageID))
}

// Validate returns an error that matches [ErrInvalidKey] and names the part that is wrong:
// each part has 1 to 255 bytes of valid UTF-8 without NUL.
// The middleware validates before it calls the repository, so the verdict is the same for every database.
func (k Key) Validate() error {
	if err := validatePart("consumer", k.Consumer); err != nil {
		return err
	}
	return validatePart("message id", k.MessageID)
}

func validatePart(part, value string) error {
	switch {
	case value == "":
		return fmt.Errorf("%w: %s is empty", ErrInvalidKey, part)
	case len(value) > maxKeyBytes:
		return fmt.Errorf("%w: %s has %d bytes, at most %d are allowed", ErrInvalidKey, part, len(value), maxKeyBytes)
	case strings.IndexByte(value, 0) >= 0:
		return fmt.Errorf("%w: %s %q contains a NUL byte", ErrInvalidKey, part, value)
	case !utf8.ValidString(value):
		return fmt.Errorf("%w: %s %q is not valid UTF-8", ErrInvalidKey, part, value)
	}
	return nil
}

// MessageUUID is the default of [Options.MessageID]: the message's UUID.
// Watermill allows it to be empty; the middleware refuses an empty one.
func MessageUUID(msg *message.Message) string {
	return msg.UUID
}

// MessageIDFromMetadata returns a message id function that reads one metadata field, for producers
// that repeat an event under a new UUID: an order number, an event id, an idempotency key.
// A message without the field has an empty id, which the middleware refuses.
func MessageIDFromMetadata(field string) func(*message.Message) string {
	return func(msg *message.Message) string {
		return msg.Metadata.Get(field)
	}
}

// FirstMessageID returns a message id function that asks the given ones in order and takes the first
// id that is not empty. All of them must identify the same message: two messages that meet on one id
// are one message to the inbox.
func FirstMessageID(functions ...func(*message.Message) string) func(*message.Message) string {
	return func(msg *message.Message) string {
		for _, messageID := range functions {
			if id := messageID(msg); id != "" {
				return id
			}
		}
		return ""
	}
}
