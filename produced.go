package inbox

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
)

// store keeps the produced messages in the claim's transaction: the router publishes them only after
// the commit, and a publish that fails must find them again. It returns what the router is to publish,
// which is nothing when there is an outbox.
func (a *attempt) store(ctx context.Context, transaction Transaction, produced []*message.Message) ([]*message.Message, error) {
	if len(produced) == 0 {
		return nil, nil
	}
	topic := message.PublishTopicFromCtx(a.outer)
	if topic == "" {
		return nil, ErrNoPublishTopic
	}
	if slices.Contains(produced, nil) {
		return nil, Permanent(errors.New("the handler returned a nil message"))
	}
	produced = nameProduced(a.inner.key, produced)
	if a.options.Outbox != nil {
		return nil, a.options.Outbox.Publish(topic, a.inside(produced)...)
	}
	encoded, err := encodeProduced(topic, produced)
	if err != nil {
		return nil, err
	}
	a.processedAt, err = transaction.Store(ctx, encoded)
	return produced, err
}

// inside returns copies with the handler's context: one of the messages may be the incoming one.
func (a *attempt) inside(produced []*message.Message) []*message.Message {
	copies := make([]*message.Message, len(produced))
	for i, msg := range produced {
		copies[i] = msg.Copy()
		copies[i].SetContext(&a.inner)
	}
	return copies
}

// replay returns the stored messages of a message that was processed before. They are published again
// until they are known to be sent: the router publishes after the commit, so they may never have been.
func (a *attempt) replay(record *Record) ([]*message.Message, error) {
	if record.Produced == nil {
		return nil, nil
	}
	topic, produced, err := decodeProduced(record.Produced)
	if err != nil {
		return nil, err
	}
	now := message.PublishTopicFromCtx(a.outer)
	if now == "" {
		return nil, fmt.Errorf("%w: the handler has no publish topic, they are for %q", ErrStoredMessages, topic)
	}
	if now != topic {
		a.options.Logger.Error("Stored messages are published to another topic than they were stored for", nil,
			a.fields().Add(watermill.LogFields{"stored_topic": topic, "topic": now}))
	}
	return produced, nil
}

// producedVersion is the version of the stored form that this module writes. Added fields keep the
// version, because unknown fields are ignored; it rises only when an older reader would send something
// wrong, and then the older reader refuses.
const producedVersion = 1

// stored is the stored form of the messages that a handler returned. Everything that may hold arbitrary
// bytes is []byte, since JSON strings would change what is not UTF-8.
type stored struct {
	Version  int             `json:"version"`
	Topic    []byte          `json:"topic"`
	Messages []storedMessage `json:"messages"`
}

type storedMessage struct {
	UUID     []byte      `json:"uuid"`
	Metadata [][2][]byte `json:"metadata,omitempty"`
	Payload  []byte      `json:"payload"`
}

// producedNamespace makes the UUIDs of messages that were produced without one. It must never change: a
// replay by a newer version has to arrive at the same UUID.
var producedNamespace = uuid.MustParse("1f2b3c0e-5d0a-4c55-9d57-6f1f6c0d7a31")

// nameProduced gives messages without a UUID a stable one, so that a consumer downstream can tell copies. Such
// a message is copied: it may be the incoming one, whose UUID may be part of its key.
func nameProduced(key Key, messages []*message.Message) []*message.Message {
	named := slices.Clone(messages)
	for i, msg := range messages {
		if msg.UUID == "" {
			// Lengths keep ("a", "bc") and ("ab", "c") apart.
			name := binary.AppendUvarint(nil, uint64(len(key.Consumer)))
			name = append(name, key.Consumer...)
			name = append(name, key.MessageID...)
			name = binary.AppendUvarint(name, uint64(i))
			named[i] = msg.CopyWithContext()
			named[i].UUID = uuid.NewSHA1(producedNamespace, name).String()
		}
	}
	return named
}

func encodeProduced(topic string, messages []*message.Message) ([]byte, error) {
	s := stored{Version: producedVersion, Topic: []byte(topic), Messages: make([]storedMessage, len(messages))}
	for i, msg := range messages {
		s.Messages[i] = storedMessage{UUID: []byte(msg.UUID), Payload: msg.Payload}
		for field, value := range msg.Metadata {
			s.Messages[i].Metadata = append(s.Messages[i].Metadata, [2][]byte{[]byte(field), []byte(value)})
		}
		fields := s.Messages[i].Metadata
		sort.Slice(fields, func(a, b int) bool { return string(fields[a][0]) < string(fields[b][0]) })
	}
	return json.Marshal(s)
}

func decodeProduced(encoded []byte) (topic string, messages []*message.Message, err error) {
	var s stored
	if err := json.Unmarshal(encoded, &s); err != nil {
		return "", nil, fmt.Errorf("%w: %w", ErrStoredMessages, err)
	}
	if s.Version != producedVersion {
		return "", nil, fmt.Errorf("%w: they have version %d, this module reads version %d", ErrStoredMessages, s.Version, producedVersion)
	}
	// Nothing is stored without these; without them a damaged record would pass for one that is sent.
	if len(s.Topic) == 0 || len(s.Messages) == 0 || slices.ContainsFunc(s.Messages, func(m storedMessage) bool { return len(m.UUID) == 0 }) {
		return "", nil, fmt.Errorf("%w: the topic, the messages or the UUID of one is missing", ErrStoredMessages)
	}
	messages = make([]*message.Message, len(s.Messages))
	for i, m := range s.Messages {
		messages[i] = message.NewMessage(string(m.UUID), m.Payload)
		for _, field := range m.Metadata {
			messages[i].Metadata.Set(string(field[0]), string(field[1]))
		}
	}
	return string(s.Topic), messages, nil
}
