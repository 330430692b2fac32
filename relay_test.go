package inbox_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

var errUncounted = errors.New("cannot count")

// miscounted has one record to publish, and does not count.
type miscounted struct {
	*inboxtest.MemoryRepository
	leased atomic.Bool
}

func (*miscounted) CountRecords(context.Context, inbox.Selection) (int, error) {
	return 0, errUncounted
}

func (m *miscounted) LeaseUnsent(context.Context, inbox.Selection, inbox.Record, int, time.Duration) ([]inbox.Record, error) {
	m.leased.Store(true)
	return nil, nil
}

type noPublisher struct{ message.Publisher }

func TestRelayPublishesThoughItCannotCount(t *testing.T) {
	t.Parallel()
	repository := &miscounted{MemoryRepository: inboxtest.NewMemoryRepository()}
	relay, err := inbox.NewRelay(repository, inbox.RelayOptions{Publishers: map[string]message.Publisher{"c": noPublisher{}}, GiveUp: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := relay.Pass(context.Background(), "c"); !errors.Is(err, errUncounted) || !repository.leased.Load() {
		t.Errorf("%v, leased: %v", err, repository.leased.Load())
	}
}
