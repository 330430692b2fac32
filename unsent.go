package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Unsent are messages that are stored and not known to be sent, for an operator to look at. Usually the next copy of the
// input sends them, or a [Relay]; [Unsent.Publish] does so by hand.
type Unsent struct {
	// Record has the key, the topic, and the messages in their stored form. The record of the inbox may be deleted.
	Record

	// Messages are what the handler returned.
	Messages []*message.Message

	// Err matches ErrStoredMessages when the messages cannot be read; then there are none.
	Err error
}

// ListUnsent returns the unsent messages of at most limit records, stored longer ago than the age, in the order of their
// keys, from the one after the given record (the zero record: from the beginning). Pass the last one of a full page to
// get the next. An age of a few minutes leaves out messages that are just being published.
func ListUnsent(ctx context.Context, records Records, age time.Duration, after Record, limit int) ([]Unsent, error) {
	var list []Unsent
	selection := Selection{OlderThan: age, Unsent: true}
	found, err := records.FindRecords(ctx, selection, after, limit)
	for _, record := range found {
		unsent := Unsent{Record: record}
		unsent.Messages, unsent.Err = decodeProduced(record.Produced)
		list = append(list, unsent)
	}
	return list, err
}

// Publish publishes the messages again, under the same UUIDs, to the topic for which they were stored, and
// marks them as sent. The publisher's nil must mean "stored". A message that is published meanwhile by a
// copy is published twice.
func (u Unsent) Publish(ctx context.Context, repository Repository, publisher message.Publisher) error {
	if u.Err != nil {
		return u.Err
	}
	if len(u.Messages) == 0 {
		return errors.New("inbox: no messages to publish")
	}
	for _, msg := range u.Messages {
		msg.SetContext(ctx)
	}
	if err := publisher.Publish(u.Topic, u.Messages...); err != nil {
		return fmt.Errorf("inbox: cannot publish the stored messages of %s: %w", u.Key, err)
	}
	_, err := repository.MarkSent(ctx, []Record{u.Record})
	return err
}
