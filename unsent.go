package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Unsent is a record with messages that are stored and not known to be sent, for an operator to look at.
// Usually the next copy of the message sends them. When none comes any more (the broker dropped it, or the
// mark was lost), [Unsent.Publish] does.
type Unsent struct {
	// Key and ProcessedAt are the record's.
	Key         Key
	ProcessedAt time.Time

	// Topic and Messages are what the handler returned, and for which publish topic.
	Topic    string
	Messages []*message.Message

	// Err matches ErrStoredMessages when the messages cannot be read; then there are none.
	Err error
}

// unsentLister is an optional ability of a [Repository]. The function is called for each record with stored
// messages not known to be sent that was processed longer ago than the age and whose key comes after the
// given one, in the order of the keys compared byte by byte, at most limit times.
type unsentLister interface {
	ListUnsent(ctx context.Context, age time.Duration, after Key, limit int, each func(Key, Record)) error
}

// ListUnsent returns at most limit records with unsent messages, in the order of their keys, from the one
// after the given key (the zero key: from the beginning). Pass the last key of a full page to get the next.
// An age of a few minutes leaves out messages that are just being published.
//
// The repository must have a method
//
//	ListUnsent(ctx context.Context, age time.Duration, after Key, limit int, each func(Key, Record)) error
//
// as inboxsql.Repository has.
func ListUnsent(ctx context.Context, repository Repository, age time.Duration, after Key, limit int) ([]Unsent, error) {
	lister, ok := repository.(unsentLister)
	if !ok {
		return nil, fmt.Errorf("inbox: %T cannot list unsent messages", repository)
	}
	var list []Unsent
	err := lister.ListUnsent(ctx, age, after, limit, func(key Key, record Record) {
		unsent := Unsent{Key: key, ProcessedAt: record.ProcessedAt}
		unsent.Topic, unsent.Messages, unsent.Err = decodeProduced(record.Produced)
		list = append(list, unsent)
	})
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
	return repository.MarkSent(ctx, []Key{u.Key})
}
