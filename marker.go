package inbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

const (
	markInterval = 100 * time.Millisecond // gathers what is published meanwhile
	markBackOff  = time.Minute            // the longest pause while marks fail
	markTimeout  = 30 * time.Second       // of one statement
	markBatch    = 500                    // records in one statement
	markPending  = 100_000                // records kept while marks fail; of the others a copy is sent once more
)

// marker marks stored messages as sent, in batches, off the path of the messages. A lost mark means one more publish
// under the same UUIDs. It has goroutines only while there is something to do.
type marker struct {
	repository Repository
	observe    func(context.Context, MarksObservation)
	logger     watermill.LoggerAdapter

	closing   chan struct{} // nothing new; no pauses
	finished  chan struct{} // closed, and nothing is active
	abandoned context.Context
	abandon   context.CancelFunc

	mutex    sync.Mutex
	closed   bool
	active   int      // goroutines that flush, and messages that are not answered yet
	records  []Record // published and not marked yet
	dropped  int      // for want of room, since it was last said
	flushing bool
}

func newMarker(repository Repository, options Options) *marker {
	m := &marker{repository: repository, observe: options.ObserveMarks, logger: options.Logger, closing: make(chan struct{}), finished: make(chan struct{})}
	m.abandoned, m.abandon = context.WithCancel(context.Background())
	return m
}

// begin registers a message that is to be waited for, unless the marker is closed.
func (m *marker) begin() bool {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if !m.closed {
		m.active++
	}
	return !m.closed
}

// end is the end of what has begun.
func (m *marker) end() {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.active--
	m.finish()
}

func (m *marker) finish() {
	select {
	case <-m.finished:
	default:
		if m.closed && m.active == 0 {
			close(m.finished)
		}
	}
}

// add marks records soon. After the marker has finished it does nothing.
func (m *marker) add(records []Record) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if m.closed && m.active == 0 {
		return
	}
	room := min(len(records), markPending-len(m.records))
	m.records = append(m.records, records[:room]...)
	m.dropped += len(records) - room
	if !m.flushing && len(m.records) > 0 {
		m.flushing = true
		m.active++
		go m.flush()
	}
}

// flush writes marks until there is nothing to mark. A statement that fails is tried with half of its records, and a
// record that fails alone goes to the end, so that it holds up no other. So do records that are locked.
func (m *marker) flush() {
	defer m.end()
	size, pause := markBatch, markInterval
	for batch := m.next(size, pause); len(batch) > 0; batch = m.next(size, pause) {
		ctx, cancel := context.WithTimeout(m.abandoned, markTimeout)
		locked, err := m.repository.MarkSent(ctx, batch)
		cancel()
		failed := locked
		switch {
		case err != nil:
			failed = batch
			pause = min(2*pause, markBackOff)
			size = max(1, len(batch)/2)
		case len(locked) > 0:
			pause = min(2*pause, markBackOff)
		case len(batch) == size:
			size, pause = min(2*size, markBatch), 0 // more may wait
		default:
			size, pause = markBatch, markInterval
		}
		m.report(len(batch)-len(failed), failed, err)
	}
}

// report puts back what was not marked, and says what became of a batch.
func (m *marker) report(marked int, failed []Record, err error) {
	m.mutex.Lock()
	m.records = append(m.records, failed...)
	pending, dropped := len(m.records), m.dropped
	m.dropped = 0
	m.mutex.Unlock()
	if err != nil {
		m.logger.Error("Cannot mark messages as sent; copies of them are sent again", err, watermill.LogFields{"records": len(failed), "pending": pending})
	}
	if dropped > 0 {
		m.logger.Error("Too many messages wait to be marked as sent; some are sent once more", nil, watermill.LogFields{"dropped": dropped, "pending": pending})
	}
	if m.observe != nil {
		m.observe(m.abandoned, MarksObservation{Records: marked, Pending: pending, Dropped: dropped, Err: err})
	}
}

// next waits and takes the next batch. When there is none, the flush has ended.
func (m *marker) next(size int, wait time.Duration) []Record {
	closing := m.closing
	if wait > markInterval {
		closing = nil // marks fail: closing does not make them succeed
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-closing:
	case <-m.abandoned.Done():
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()
	if len(m.records) == 0 || m.abandoned.Err() != nil {
		m.flushing = false
		return nil
	}
	size = min(size, len(m.records))
	batch := append([]Record(nil), m.records[:size]...)
	m.records = m.records[size:]
	return batch
}

// close lets nothing new in, marks what is published, and waits for what is not yet, until ctx ends. A statement that
// is under way then ends by itself, or with its network.
func (m *marker) close(ctx context.Context) error {
	m.mutex.Lock()
	if !m.closed {
		m.closed = true
		close(m.closing)
		m.finish()
	}
	m.mutex.Unlock()

	select {
	case <-m.finished:
	case <-ctx.Done():
		m.abandon()
		m.mutex.Lock()
		defer m.mutex.Unlock()
		return fmt.Errorf("inbox: closed before all messages were answered, or all stored ones marked as sent (%d are not): %w", len(m.records), ctx.Err())
	}
	return nil
}
